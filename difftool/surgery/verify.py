"""Prove that a converted checkpoint is the same function as its source.

Both are loaded from disk, one after the other, and run on the same tokens: a left-padded batch in
one pass, the same tokens one by one with the KV cache, and greedy generation.
"""

import inspect
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from difftool.errors import UserError
from difftool.surgery.loading import loaded_model

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
)
LENGTH = 24  # tokens of a prompt where there is no tokenizer
DECODED = 4  # tokens run one by one with the cache
GENERATED = 8

# What rounding may do to a logit, relative to the largest: a matrix product may be summed in
# another order once it has more columns. A misplaced head changes logits by their own size.
ROUNDING = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


# One decoded token under a padding mask: transformers >= 5.24 multiplies all query heads of a group
# as one matrix (`pack_gqa`), and twice the rows may be summed in another order. Rounding only.
PACKED = "padded cached decoding"


@dataclass(frozen=True)
class Observed:
    """What one model said: by pass, outputs [tokens, vocab] in float32; and what it generated."""

    outputs: dict[str, torch.Tensor]
    generated: list[list[int]]  # token ids, empty for a model that cannot generate


@dataclass(frozen=True)
class Comparison:
    """How far the result is from its source in one dtype.

    Attributes:
        differences: by pass, max |difference| of the logits (of the hidden state without a head).
        max_logit: largest |logit| of the source.
        kl: of the source to the result, nats per token of the padded batch.
    """

    dtype: str
    differences: dict[str, float]
    max_logit: float
    kl: float
    top1_agreement: float
    greedy_equal: bool
    tokens: int

    @property
    def max_difference(self) -> float:
        return max(self.differences.values())

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as they stand in difftool.json."""
        return {**asdict(self), "verdict": self.verdict()}

    def verdict(self) -> str:
        """Say in words how close the two are."""
        apart = {name: value for name, value in self.differences.items() if value != 0}
        if not apart:
            return "bit-identical"
        within = f"within {self.max_difference:.1e} of logits up to {self.max_logit:.3g}"
        return f"bit-identical; {PACKED} {within}" if apart.keys() == {PACKED} else within


def verify(
    source: Path,
    result: Path,
    exactness: str,
    dtypes: tuple[torch.dtype, ...],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    max_memory: int | None = None,
) -> list[Comparison]:
    """Compare two checkpoints in each dtype.

    Args:
        source: folder of the source.
        result: folder of the converted checkpoint.
        exactness: "bits" or "rounding" (differences beyond rounding in each dtype fail), "weights"
            (beyond rounding in the first of `dtypes`, that of the weights), or "none".
        dtypes: to load both in.
        tokenizer: of the source; None runs random tokens.
        max_memory: see `loaded_model`.

    Raises:
        UserError: the source gives NaN, or the result is not the same function.
    """
    comparisons = []
    for dtype in dtypes:
        before, after = (
            _observe(folder, dtype, tokenizer, max_memory) for folder in (source, result)
        )
        if any(output.isnan().any() for output in before.outputs.values()):
            raise UserError(
                f"the source gives NaN in {dtype}", "finite logits", "Try --dtype bfloat16"
            )
        comparison = compare(before, after, dtype)
        rounding = ROUNDING[dtypes[0] if exactness == "weights" else dtype]
        limit = rounding * comparison.max_logit
        if exactness != "none" and not comparison.max_difference <= limit:
            raise UserError(
                f"the converted model is not the same function in {comparison.dtype}: "
                f"{comparison.verdict()}, KL {comparison.kl:.2g} nats per token",
                f"a difference of at most {limit:.2g}",
                "Nothing was kept. Please report this, with the model's name",
            )
        comparisons.append(comparison)
    return comparisons


def compare(before: Observed, after: Observed, dtype: torch.dtype) -> Comparison:
    """Compare what two models said on the same tokens."""
    one, two = next(iter(before.outputs.values())), next(iter(after.outputs.values()))
    reference = one.log_softmax(-1)
    divergence = (reference.exp() * (reference - two.log_softmax(-1))).sum(-1)
    return Comparison(
        dtype=str(dtype).removeprefix("torch."),
        differences={
            name: float((output - after.outputs[name]).abs().max())
            for name, output in before.outputs.items()
        },
        max_logit=float(one.abs().max()),
        kl=float(divergence.mean()),
        top1_agreement=float((one.argmax(-1) == two.argmax(-1)).float().mean()),
        greedy_equal=before.generated == after.generated,
        tokens=one.shape[0],
    )


@torch.no_grad()
def _observe(
    folder: Path,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase | None,
    max_memory: int | None,
) -> Observed:
    with loaded_model(folder, dtype, max_memory=max_memory) as model:
        tokens, mask = _batch(model, tokenizer)
        full = _outputs(model(tokens, attention_mask=mask))
        if full.dim() == 3:  # [B, T, V]: what padding says does not count
            full = full[mask.bool()]
        outputs = {"padded batch": full.float()}
        if not model.can_generate():
            return Observed(outputs, [])
        outputs["cached decoding"] = _cached(model, tokens[:1], None)
        outputs[PACKED] = _cached(model, tokens, mask)
        return Observed(outputs, _generated(model, tokens, mask))


def _outputs(output: Any) -> torch.Tensor:
    logits: torch.Tensor = output["logits"] if "logits" in output else output["last_hidden_state"]
    return logits


def _batch(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and mask [B, T], padded on the left."""
    config = model.config
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        sizes = (LENGTH, LENGTH * 2 // 3)
        rows = [torch.randint(config.vocab_size, (n,), generator=generator) for n in sizes]
    else:
        rows = [torch.tensor(tokenizer(text)["input_ids"]) for text in PROMPTS]
        rows = [row.clamp(max=config.vocab_size - 1) for row in rows]
    if config.pad_token_id is None and not model.can_generate():
        rows = rows[:1]  # a classifier finds its last token by the padding
    rows.sort(key=len, reverse=True)
    longest = len(rows[0])
    pad = config.pad_token_id if config.pad_token_id is not None else 0
    tokens = torch.full((len(rows), longest), pad)
    mask = torch.zeros_like(tokens)
    for index, row in enumerate(rows):
        tokens[index, longest - len(row) :] = row
        mask[index, longest - len(row) :] = 1
    return tokens, mask


def _cached(
    model: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Return the outputs [steps * B, V] of the last tokens, run one by one on one thread.

    Each thread has scratch memory of its own in the CPU's attention kernel, and where that lies
    decides how a single row is summed: with several, two equal heads may differ in the last bit.
    """
    named = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in named else "past_key_values"  # renamed in transformers 5.24
    cache = {name: DynamicCache(config=model.config), "use_cache": True}

    def run(start: int, end: int) -> torch.Tensor:
        seen = None if mask is None else mask[:, :end]
        logits: torch.Tensor = model(tokens[:, start:end], attention_mask=seen, **cache).logits
        return logits[:, -1]

    start = tokens.shape[1] - DECODED
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run(0, start)
        steps = [run(end - 1, end) for end in range(start + 1, tokens.shape[1] + 1)]
    finally:
        torch.set_num_threads(threads)
    return torch.cat(steps).float()


def _generated(model: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    generate: Any = model.generate
    tokens = generate(tokens, attention_mask=mask, max_new_tokens=GENERATED, do_sample=False)
    return tokens.tolist()

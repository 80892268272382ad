"""One timing: a model reads a prompt, then writes tokens one by one with its KV cache."""

import inspect
import time
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel

from difftool.bench.process_memory import peak_bytes, reset_peak

STEPS = 16  # tokens decoded after the prompt
PROBE = 8  # tokens of the prompt that shows the attention kernels


class Cell(BaseModel):
    """What is timed: `batch` prompts of `context` tokens each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.batch} × {self.context}"


class Trial(BaseModel):
    """A cell timed once on one model.

    Attributes:
        prefill: seconds from the prompt to its logits.
        first_token: seconds from the prompt to the first token's id in Python.
        steps: seconds of each decoding step.
        peak_rss: resident bytes of the process at their most, where the system can tell in this
            trial, else so far.
        peak_gpu: bytes of tensors on the GPU at their most in this trial; None without CUDA.
        kv_bytes: of the KV cache once it holds the prompt.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefill: float
    first_token: float
    steps: tuple[float, ...]
    peak_rss: int
    peak_gpu: int | None
    kv_bytes: int


@torch.no_grad()
def time_trial(model: PreTrainedModel, run: Any, cell: Cell, seed: int) -> Trial:
    """Time a prompt of random tokens, the same for the same seed, and STEPS greedy tokens.

    Args:
        model: in eval mode.
        run: the model itself, or what torch.compile made of it.
        cell: batch and context.
        seed: of the prompt.
    """
    device = model.device
    tokens = make_prompt(model, cell, seed).to(device)
    cache = DynamicCache(config=model.config)
    options = call_options(model, cache)
    _reset_peaks(device)
    started = _now(device)
    logits = run(tokens, **options).logits  # [B, 1, V]
    prefill = _now(device) - started
    token = logits[:, -1].argmax(-1, keepdim=True)  # [B, 1]
    token.tolist()
    first_token = _now(device) - started
    kv_bytes = cache_bytes(cache)
    steps = []
    for _ in range(STEPS):
        started = _now(device)
        token = run(token, **options).logits[:, -1].argmax(-1, keepdim=True)
        steps.append(_now(device) - started)
    on_cuda = device.type == "cuda"
    return Trial(
        prefill=prefill,
        first_token=first_token,
        steps=tuple(steps),
        peak_rss=peak_bytes(),
        peak_gpu=torch.cuda.max_memory_allocated(device) if on_cuda else None,
        kv_bytes=kv_bytes,
    )


def make_prompt(model: PreTrainedModel, cell: Cell, seed: int) -> torch.Tensor:
    """Return random token ids [B, T] on the CPU."""
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (cell.batch, cell.context), generator=generator)


def call_options(model: PreTrainedModel, cache: DynamicCache) -> dict[str, Any]:
    """Return keyword arguments: use this cache and, where the model can, give the last logits."""
    named = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in named else "past_key_values"  # renamed in transformers 5.24
    last = {"logits_to_keep": 1} if "logits_to_keep" in named else {}
    return {name: cache, "use_cache": True, **last}


def cache_bytes(cache: DynamicCache) -> int:
    """Return the bytes of all keys, values and states that a cache holds."""
    tensors = [
        value
        for layer in cache.layers
        for value in vars(layer).values()
        if isinstance(value, torch.Tensor) and value.dim() > 1
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def find_positions(model: PreTrainedModel) -> int | None:
    """Return how many positions the model was made for; None if its config does not say."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return None if positions is None else int(positions)


def fits(cell: Cell, positions: int | None) -> bool:
    """Return whether the prompt and the tokens after it have a position each."""
    return positions is None or cell.context + STEPS <= positions


def attention_kernels(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the fused attention operators that the model calls; none where it has no such."""
    cell = Cell(batch=1, context=PROBE)
    if not fits(cell, find_positions(model)):
        return ()
    with _Operators() as seen:
        time_trial(model, model, cell, seed=0)
    return tuple(sorted(name for name in seen.names if "attention" in name or "attn" in name))


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the names of all operators that torch runs, as "aten::mm"."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def _reset_peaks(device: torch.device) -> None:
    reset_peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _now(device: torch.device) -> float:
    """Return the time in seconds once the device has done all that it was told."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()

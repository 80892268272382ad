"""Stream text from a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from difftool.checkpoint import open_checkpoint, require_weights
from difftool.errors import UserError
from difftool.sources import open_source
from difftool.surgery.expected import check_tensors
from difftool.surgery.host import read_host
from difftool.surgery.loading import find_dtype, load_tokenizer, loaded_model


@dataclass(frozen=True)
class GenerateOptions:
    """Options of `generate`.

    Attributes:
        max_new_tokens: at most so many; the model's own end of text stops earlier.
        dtype: to compute in ("float32", …); None as the weights are stored.
        temperature: 0 is greedy.
        seed: of the sampling.
        trust_remote_code: run code that lies in the checkpoint's folder.
    """

    max_new_tokens: int = 64
    dtype: str | None = None
    temperature: float = 0.0
    seed: int = 0
    trust_remote_code: bool = False


class _Writer(TextStreamer):
    """Hands each finished piece of text to `write`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.write(text)


def generate(
    source: str, prompt: str, options: GenerateOptions, write: Callable[[str], None]
) -> None:
    """Hand the prompt and then its continuation to `write`, piece by piece.

    Raises:
        UserError: no such source, a source without tokenizer, or one that cannot generate.
    """
    with open_source(source, dtype=options.dtype) as opened:
        checkpoint = open_checkpoint(opened.path)
        require_weights(checkpoint)
        check_tensors(checkpoint, read_host(checkpoint))
        tokenizer = load_tokenizer(opened.path, options.trust_remote_code)
        if tokenizer is None:
            raise UserError(
                f"{source} has no tokenizer that may be used",
                "tokenizer.json or tokenizer.model beside the weights",
                "A tokenizer that is code in the folder needs --trust-remote-code",
            )
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        if inputs["input_ids"].numel() == 0:
            raise UserError("the prompt is empty and the tokenizer begins with no token of its own")
        with loaded_model(opened.path, find_dtype(opened.path, options.dtype)) as model:
            if not model.can_generate():
                raise UserError(f"{type(model).__name__} has no language-model head")
            _check_length(model, inputs["input_ids"].shape[1], options)
            write(prompt)
            _run(model, dict(inputs), _Writer(tokenizer, write), options)


def _check_length(model: PreTrainedModel, tokens: int, options: GenerateOptions) -> None:
    """Refuse a text longer than a table of learned positions; rotary ones have no such end."""
    positions = getattr(model.config, "n_positions", None)
    if positions is not None and tokens + options.max_new_tokens > positions:
        raise UserError(
            f"{tokens} tokens of prompt and {options.max_new_tokens} new ones are too many",
            f"at most {positions} together, which is all that the model has positions for",
            "Use a smaller --max-new-tokens",
        )


def _run(
    model: PreTrainedModel, inputs: dict[str, Any], writer: TextStreamer, options: GenerateOptions
) -> None:
    sampling: dict[str, Any] = {"do_sample": False}
    if options.temperature > 0:
        sampling = {"do_sample": True, "temperature": options.temperature}
    torch.manual_seed(options.seed)
    run: Any = model.generate
    run(**inputs, max_new_tokens=options.max_new_tokens, streamer=writer, **sampling)

"""A checkpoint under measurement: logits for token ids, whatever runs it underneath."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from difftool.bench.options import BenchOptions
from difftool.checkpoint import Checkpoint, open_checkpoint, require_weights
from difftool.errors import UserError
from difftool.sources import open_source
from difftool.surgery.expected import check_tensors
from difftool.surgery.families import FAMILIES
from difftool.surgery.host import read_host
from difftool.surgery.loading import find_dtype, load_tokenizer, loaded_model, quiet


class LanguageModel(Protocol):
    """The one thing that every accuracy measure needs; ONNX and quantised folders have it too."""

    @property
    def vocab_size(self) -> int:
        """Logits per position."""
        ...

    def logits(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits [B, T, V] for token ids [B, T]; `mask` [B, T] is 0 on padding."""
        ...


@dataclass(frozen=True)
class TorchModel:
    """A transformers model in eval mode."""

    module: PreTrainedModel

    @property
    def vocab_size(self) -> int:
        return int(self.module.config.get_text_config().vocab_size)

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        device = self.module.device
        mask = None if mask is None else mask.to(device)
        output = self.module(tokens.to(device), attention_mask=mask, use_cache=False)
        logits: torch.Tensor = output.logits
        return logits


@dataclass(frozen=True)
class Subject:
    """An open checkpoint.

    Attributes:
        name: short, unique in its bench; what tables and charts call it.
        id: hub id, folder name or tiny, free of local paths.
        folder: where it lies.
        family: model_type, of the host where something was grafted onto it.
        targets: what was grafted.
        model: gives logits.
        tokenizer: None where the folder has none.
    """

    name: str
    id: str
    folder: Path
    family: str
    targets: tuple[str, ...]
    model: LanguageModel
    tokenizer: PreTrainedTokenizerBase | None

    @property
    def module(self) -> PreTrainedModel:
        """The torch model, for measures that look inside; a UserError where there is none."""
        if isinstance(self.model, TorchModel):
            return self.model.module
        raise UserError(f"{self.name} does not run in torch, so nothing inside it can be measured")

    def require_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer; a UserError where there is none."""
        if self.tokenizer is None:
            raise UserError(
                f"{self.name} has no tokenizer that may be used",
                "tokenizer.json or tokenizer.model beside the weights",
                "A tokenizer that is code in the folder needs --trust-remote-code",
            )
        return self.tokenizer


def find_device(name: str | None) -> torch.device:
    """Return the device called `name`, or the first GPU, or the CPU."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"the device {name!r} cannot be used: {reason}", "cpu, cuda, or cuda:1"
        ) from error
    return device


@contextmanager
def open_subject(name: str, source: str, options: BenchOptions) -> Iterator[Subject]:
    """Yield what `source` names, loaded; `name` is what the report calls it.

    Raises:
        UserError: no such source, or one that has no language-model head.
    """
    with open_source(source, dtype=options.dtype) as opened:
        checkpoint = open_checkpoint(opened.path)
        with open_model(checkpoint, options) as module:
            host = read_host(checkpoint) if _is_known(checkpoint) else None
            yield Subject(
                name=name,
                id=opened.id,
                folder=opened.path,
                family=host.model_type if host else str(checkpoint.config["model_type"]),
                targets=host.targets if host else (),
                model=TorchModel(module),
                tokenizer=load_tokenizer(
                    opened.path, options.trust_remote_code, as_host=host is not None
                ),
            )


@contextmanager
def open_model(checkpoint: Checkpoint, options: BenchOptions) -> Iterator[PreTrainedModel]:
    """Yield a checkpoint's model on the device that the options name.

    One of a family that difftool does not know is loaded as transformers loads it.

    Raises:
        UserError: no weights, or no language-model head.
    """
    device = find_device(options.device)
    require_weights(checkpoint)
    load = _known_model if _is_known(checkpoint) else _any_model
    with load(checkpoint, options) as module:
        if not module.can_generate():
            raise UserError(f"{type(module).__name__} has no language-model head")
        if not any(parameter.is_meta for parameter in module.parameters()):  # else it stays on disk
            cast(torch.nn.Module, module).to(device)
        yield module


def _is_known(checkpoint: Checkpoint) -> bool:
    config = checkpoint.config
    return config.get("host_model_type", config.get("model_type")) in FAMILIES


@contextmanager
def _known_model(checkpoint: Checkpoint, options: BenchOptions) -> Iterator[PreTrainedModel]:
    check_tensors(checkpoint, read_host(checkpoint))
    with loaded_model(checkpoint.path, find_dtype(checkpoint.path, options.dtype)) as module:
        yield module


@contextmanager
def _any_model(checkpoint: Checkpoint, options: BenchOptions) -> Iterator[PreTrainedModel]:
    """Load a model that difftool's table of families does not have, if transformers can."""
    dtype: Any = options.dtype or "auto"
    try:
        with quiet():
            module: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                checkpoint.path,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=options.trust_remote_code,
            )
    except (ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"transformers cannot load {checkpoint.path}: {reason}") from error
    yield module.eval()

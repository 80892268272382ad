"""Load a checkpoint, plain or converted, without executing anything that lies in its folder."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from difftool.checkpoint import Checkpoint, open_checkpoint
from difftool.errors import UserError
from difftool.header import torch_dtype
from difftool.surgery.host import Host, read_host, resolve_config
from difftool.surgery.shim import model_class
from difftool.weights import read_json

SHARE_OF_MEMORY = 0.7  # of what is free, that a model's weights may take before they go to disk
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@contextmanager
def loaded_model(
    folder: Path, dtype: torch.dtype, *, max_memory: int | None = None
) -> Iterator[PreTrainedModel]:
    """Yield the checkpoint's model in eval mode on the CPU, its weights offloaded if too large.

    Args:
        folder: a checkpoint of a family that difftool knows, with or without targets.
        dtype: of the floating weights.
        max_memory: bytes that the weights may take; what exceeds them is read from disk layer by
            layer in each forward pass. None takes a share of what is free.

    Raises:
        UserError: a weight is missing from the checkpoint or does not fit the model.
    """
    checkpoint = open_checkpoint(folder)
    host = read_host(checkpoint)
    limit = int(psutil.virtual_memory().available * SHARE_OF_MEMORY)
    limit = limit if max_memory is None else max_memory
    size = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    size = int(size * dtype.itemsize / _stored_itemsize(host))
    with tempfile.TemporaryDirectory(prefix="difftool-offload-") as scratch, quiet():
        placement: dict[str, Any] = {}
        if size > limit:
            placement = {
                "device_map": "auto",
                "max_memory": {"cpu": limit},
                "offload_folder": scratch,
            }
        yield _load(checkpoint, host, dtype, placement)


def _stored_itemsize(host: Host) -> int:
    return {"F64": 8, "F32": 4}.get(host.dtype, 2)


def _load(
    checkpoint: Checkpoint, host: Host, dtype: torch.dtype, placement: dict[str, Any]
) -> PreTrainedModel:
    model, report = model_class(host).from_pretrained(
        checkpoint.path,
        dtype=dtype,
        output_loading_info=True,
        use_safetensors=True,
        local_files_only=True,
        **placement,
    )
    faults = [*report["missing_keys"], *report["mismatched_keys"]]
    if faults:
        raise UserError(
            f"{checkpoint.path} lacks weights of {host.architecture}: {faults[0]}"
            + (f" and {len(faults) - 1} more" if len(faults) > 1 else ""),
            "a weight for every parameter",
        )
    loaded: PreTrainedModel = model.eval()
    _align(loaded)
    return loaded


def _align(model: PreTrainedModel) -> None:
    """Move the weights out of the mapped file into memory that torch aligned itself.

    In the file a tensor lies wherever the header's length puts it, and a matrix-vector product may
    round differently by where its operand starts: two copies of one model would differ by that.
    """
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.clone()
    for module, hook in _offloaded(model):
        hook.weights_map = _Aligned(hook.weights_map)
        if type(module).forward is nn.Module.forward:  # never called: others read its weights
            hook.pre_forward(module)


def _offloaded(model: nn.Module) -> Iterator[tuple[nn.Module, AlignDevicesHook]]:
    """Yield the modules whose weights are on disk, and what fetches these before a forward."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for part in hook.hooks if isinstance(hook, SequentialHook) else (hook,):
            if isinstance(part, AlignDevicesHook) and part.offload:
                yield module, part


class _Aligned(Mapping[str, torch.Tensor]):
    """Offloaded weights, each fetched into memory of its own."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.weights = weights

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.weights[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' own progress bars and loading report out of the terminal."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()


def load_tokenizer(
    folder: Path, trust_remote_code: bool = False, *, as_host: bool = True
) -> PreTrainedTokenizerBase | None:
    """Return the folder's tokenizer, or None where it has none that may be used.

    A tokenizer that is code in the folder is used only with `trust_remote_code`. A converted
    checkpoint gets the tokenizer that transformers has for the host's `model_type`, or with
    `as_host=False` the one that a user gets who knows nothing of difftool.

    Raises:
        UserError: the tokenizer's files are damaged, or need a package that is not installed.
    """
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    settings = {
        name: read_json(folder / name)  # what is cut off is told here, with its place
        for name in ("tokenizer.json", "tokenizer_config.json")
        if (folder / name).exists()
    }
    if "auto_map" in settings.get("tokenizer_config.json", {}) and not trust_remote_code:
        return None
    config: dict[str, Any] = {}
    if as_host:
        config = {"config": resolve_config(read_host(open_checkpoint(folder)).config)}
    try:
        with quiet():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code, **config
            )
    except (OSError, ImportError, ValueError, TypeError, LookupError, AttributeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"the tokenizer in {folder} cannot be loaded: {reason}") from error
    return tokenizer


def find_dtype(folder: Path, name: str | None) -> torch.dtype:
    """Return the dtype called `name` ("float32"), or that of most of the folder's weights."""
    if name is not None:
        return cast(torch.dtype, getattr(torch, name))
    return torch_dtype(read_host(open_checkpoint(folder)).dtype)

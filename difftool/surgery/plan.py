"""What a conversion will do, decided before anything is written."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from pydantic import BaseModel, ValidationError

from difftool.checkpoint import Checkpoint, Computed, Copied, Output, TensorInfo, read_tensor
from difftool.errors import UserError, did_you_mean
from difftool.header import size_in_bytes, torch_dtype
from difftool.surgery.expected import check_tensors, expect
from difftool.surgery.host import FLOATS, Host
from difftool.surgery.shim import Shim, build_shim
from difftool.surgery.targets import load_target, target_names
from difftool.weights import SINGLE


@dataclass(frozen=True)
class Plan:
    """A conversion before it is written.

    Attributes:
        source: the checkpoint; without weights, its tensors as config and index imply them.
        targets: what the result will have, the new target included.
        exactness: how close the result must come: "bits", "rounding" of the arithmetic,
            "weights" whose own rounding shows too, or "none".
        outputs: every tensor of the result, in the order of the source.
        unused: tensors that transformers does not use; they are carried along.
    """

    source: Checkpoint
    host: Host
    target: str
    options: BaseModel
    targets: tuple[str, ...]
    exactness: str
    config: dict[str, Any]
    shim: Shim
    outputs: dict[str, Output]
    unused: tuple[str, ...]

    @property
    def exactness_in_words(self) -> str:
        return {
            "bits": "the same function to the bit",
            "rounding": "the same function to rounding",
            "weights": "the same function to the rounding of its weights",
            "none": "not the same function, as its options ask",
        }[self.exactness]


def parse_options(target: str, settings: dict[str, Any]) -> BaseModel:
    """Return the target's options from `--set` pairs; a UserError names the one that is wrong."""
    model: type[BaseModel] = load_target(target).Options
    for key in settings:
        if key not in model.model_fields:
            raise UserError(
                f"{target} has no option {key!r}",
                f"one of {', '.join(model.model_fields)}",
                did_you_mean(key, model.model_fields).strip(),
            )
    try:
        return model.model_validate(settings)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        if not faults[0]["loc"]:
            raise UserError(
                f"{target} options {', '.join(settings)} do not go together", faults[0]["msg"]
            ) from error
        key = str(faults[0]["loc"][0])
        reasons = [fault["msg"] for fault in faults if fault["loc"][0] == key]
        reason = ", or ".join([reasons[0], *(text[:1].lower() + text[1:] for text in reasons[1:])])
        raise UserError(
            f"{target} option {key}={settings.get(key)!r} cannot be used", reason
        ) from error


def find_refusal(host: Host, target: str) -> str | None:
    """Return why `target` cannot be grafted onto this model, or None if it can."""
    if target in host.targets:
        return f"it is already converted to {target}"
    reason: str | None = load_target(target).refusal(host)
    return reason


def plan_conversion(
    source: Checkpoint, host: Host, target: str, options: BaseModel, *, dtype: str | None = None
) -> Plan:
    """Decide every tensor and the config of the result; reads headers only.

    Args:
        source: the checkpoint, or config and index alone.
        host: what `read_host` told of it.
        target: name of the target.
        options: the target's `Options`.
        dtype: of the floating tensors, in safetensors' spelling; None keeps each one's own.

    Raises:
        UserError: the target cannot be had, or the tensors contradict the config.
    """
    module = load_target(target)
    if reason := find_refusal(host, target):
        raise UserError(f"{host.model_type} is not converted to {target}: {reason}")
    unused: tuple[str, ...] = ()
    if source.complete:
        unused = check_tensors(source, host)
    else:
        source = imply_tensors(source, host)
    targets = tuple(name for name in target_names() if name in (*host.targets, target))
    shim = build_shim(host, targets)
    outputs: dict[str, Output] = module.rewrite(host, options, source, dtype)
    if dtype is not None:
        outputs = {name: _cast(output, source, dtype) for name, output in outputs.items()}
    config = _configure(host, module.configure(host, options), shim, dtype)
    exactness = module.exactness(host, options, dtype)
    return Plan(source, host, target, options, targets, exactness, config, shim, outputs, unused)


def imply_tensors(source: Checkpoint, host: Host) -> Checkpoint:
    """Fill in the tensors that config (and index) imply, for planning without weights.

    Experts that the index lists one by one appear merged, as the model has them.
    """
    expected = expect(host)
    files = (source.index or {}).get("weight_map") or dict.fromkeys(expected.shapes, SINGLE)
    tensors = {}
    for stored, file in files.items():
        loaded, is_part = expected.loads_as(stored)
        if loaded in expected.shapes:
            name, shape = loaded if is_part else stored, expected.shapes[loaded]
            size = size_in_bytes(host.dtype, shape)
            tensors[name] = TensorInfo(name, host.dtype, shape, file, 0, size)
    return replace(source, tensors=tensors)


def _configure(
    host: Host, changes: dict[str, Any], shim: Shim, dtype: str | None
) -> dict[str, Any]:
    config = {
        **host.config,
        **changes,
        "model_type": shim.model_type,
        "architectures": [shim.architecture],
        "auto_map": shim.auto_map,
        "host_model_type": host.model_type,
        "host_architecture": host.architecture,
    }
    if dtype is not None:
        key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
        config[key] = str(torch_dtype(dtype)).removeprefix("torch.")
    return config


def _cast(output: Output, source: Checkpoint, dtype: str) -> Output:
    """Return `output` in another floating dtype; integers and packed floats stay as they are."""
    if output.dtype not in FLOATS or output.dtype == dtype:
        return output
    return Computed(dtype, output.shape, partial(_compute_cast, output, source, torch_dtype(dtype)))


def _compute_cast(output: Output, source: Checkpoint, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(output, Copied):
        tensor = read_tensor(source, output.source.name)
    else:
        tensor = output.compute()
    result = tensor.to(dtype)
    if dtype == torch.float16 and result.isinf().any() and not tensor.isinf().any():
        raise UserError(
            f"a tensor holds values up to {tensor.abs().max():.3g}, which float16 cannot hold",
            fix="Use --dtype bfloat16",
        )
    return result

"""The tensors that transformers would load: what a checkpoint is checked against before surgery."""

import copy
import re
from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from difftool.checkpoint import Checkpoint
from difftool.errors import UserError
from difftool.surgery.host import CONFIG_FAULTS, Host, rejected, resolve_config
from difftool.surgery.shim import model_class

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Expected:
    """What transformers would load: the shapes by the model's own names, and its renaming rules."""

    shapes: dict[str, tuple[int, ...]]
    prefix: str
    renamings: list[WeightRenaming]
    converters: list[WeightConverter]

    def loads_as(self, stored: str) -> tuple[str, bool]:
        """Return the model's name for a stored tensor, and whether it becomes a part of that one.

        Old spellings are renamed, experts merged, and the base model's prefix added or dropped.
        """
        if stored in self.shapes:
            return stored, False
        name, pattern = rename_source_key(
            stored, self.renamings, self.converters, self.prefix, self.shapes
        )
        return name, pattern is not None


def expect(host: Host) -> Expected:
    """Ask the model's class, on the meta device, what it would load."""
    loader = model_class(host)
    plain = copy.deepcopy(host.config)
    for key in ("auto_map", "quantization_config"):
        plain.pop(key, None)
    try:
        with torch.device("meta"):
            model = loader(loader.config_class.from_dict(plain))
    except CONFIG_FAULTS as error:
        raise rejected(host.model_type, error) from error
    rules = get_model_conversion_mapping(model)
    return Expected(
        shapes={name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
        prefix=model.base_model_prefix,
        renamings=[rule for rule in rules if isinstance(rule, WeightRenaming)],
        converters=[rule for rule in rules if isinstance(rule, WeightConverter)],
    )


def check_tensors(checkpoint: Checkpoint, host: Host) -> tuple[str, ...]:
    """Check names and shapes against the config; return the names that the model will not use.

    Raises:
        UserError: a config that no model can be built from, a shape that contradicts it, a missing
            tensor, a missing expert.
    """
    expected = expect(host)
    loaded = {name: expected.loads_as(name) for name in checkpoint.tensors}
    for stored, info in checkpoint.tensors.items():
        name, is_part = loaded[stored]
        if not is_part and info.shape != expected.shapes.get(name, info.shape):
            raise UserError(
                f"tensor {stored!r} in {info.file} has the shape {list(info.shape)}",
                f"the shape {list(expected.shapes[name])}, as config.json says",
                "Take config.json and weights from one revision of the same model",
            )
    _check_experts(checkpoint.tensors)
    present = {name for name, _ in loaded.values()}
    optional = _tied(host)
    missing = [
        name
        for name in expected.shapes
        if name not in present and name not in optional and not _is_packed(name, host)
    ]
    if missing:
        raise _missing(checkpoint, missing)
    return tuple(
        stored
        for stored, (name, _) in loaded.items()
        if name not in expected.shapes and not _is_packed(stored, host)
    )


def _tied(host: Host) -> Container[str]:
    """Return the tensors that need not be stored because they are another one's."""
    tied: dict[str, str] = getattr(model_class(host), "_tied_weights_keys", None) or {}
    return tied if resolve_config(host.config).tie_word_embeddings else ()


def _is_packed(name: str, host: Host) -> bool:
    """Whether a tensor belongs to experts that are stored in a quantised form of their own."""
    return "quantization_config" in host.config and ".experts." in name


def _check_experts(names: Iterable[str]) -> None:
    """Check that experts which are stored one by one are all there, each with the same parts."""
    parts: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        if match := EXPERT.fullmatch(name):
            parts[match[1]][match[3]].add(match[2])
    for experts, by_part in parts.items():
        everyone = set().union(*by_part.values())
        for part, present in by_part.items():
            if absent := sorted(everyone - present, key=int):
                raise UserError(
                    f"tensor '{experts}.{absent[0]}.{part}' is missing from the checkpoint",
                    fix="Download the checkpoint again",
                )


def _missing(checkpoint: Checkpoint, missing: list[str]) -> UserError:
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    found = f"tensor {missing[0]!r}{more} is missing from {checkpoint.path}"
    if missing == ["lm_head.weight"]:
        return UserError(
            found,
            "an output head, or tie_word_embeddings: true in config.json",
            "Set tie_word_embeddings if the model shares its embeddings, or restore the head",
        )
    return UserError(
        found, "every tensor of the model that config.json describes", "Download it again"
    )

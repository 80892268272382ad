"""The tensors that transformers would load: what a checkpoint is checked against before surgery."""

import re
from collections import defaultdict
from collections.abc import Iterable

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from difftool.checkpoint import Checkpoint
from difftool.errors import UserError
from difftool.surgery.host import Host, resolve_config
from difftool.surgery.shim import model_class

LEFT_OVER = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|\.attention\.(masked_)?bias$")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")


def expected_shapes(host: Host) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of the model's state, built on the meta device."""
    config_class = model_class(host).config_class
    plain = {k: v for k, v in host.config.items() if k not in ("auto_map", "quantization_config")}
    with torch.device("meta"):
        model = model_class(host)(config_class.from_dict(plain))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def check_tensors(checkpoint: Checkpoint, host: Host) -> tuple[str, ...]:
    """Check names and shapes against the config; return the names that the model will not use.

    Raises:
        UserError: a shape that contradicts the config, a missing tensor, a missing expert.
    """
    expected = expected_shapes(host)
    for name, info in checkpoint.tensors.items():
        if name in expected and info.shape != expected[name]:
            raise UserError(
                f"tensor {name!r} in {info.file} has the shape {list(info.shape)}",
                f"{list(expected[name])}, as config.json says",
                "Take config.json and weights from one revision of the same model",
            )
    _check_experts(checkpoint.tensors)
    missing = [
        name
        for name in expected
        if name not in checkpoint.tensors and not _comes_otherwise(name, host)
    ]
    if missing:
        raise _missing(checkpoint, missing)
    extra = (name for name in checkpoint.tensors if name not in expected)
    return tuple(name for name in extra if not _is_stored_apart(name, host))


def _comes_otherwise(name: str, host: Host) -> bool:
    """Whether a tensor is tied to another, or made of others when the model is loaded."""
    resolved = resolve_config(host.config)
    tied = getattr(model_class(host), "_tied_weights_keys", None) or {}
    if resolved.tie_word_embeddings and name in tied:
        return True
    return _is_stored_apart(name, host)


def _is_stored_apart(name: str, host: Host) -> bool:
    """Whether a tensor belongs to experts, which a checkpoint may store one by one or packed."""
    converted = get_checkpoint_conversion_mapping(host.model_type) is not None
    packed = "quantization_config" in host.config
    return (converted or packed) and bool(re.search(r"\.(experts|block_sparse_moe|mlp\.gate)\b", name))


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

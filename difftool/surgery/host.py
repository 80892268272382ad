"""What the surgery knows of a checkpoint: its family, its geometry, what was grafted before."""

import copy
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    PretrainedConfig,
)

from difftool.checkpoint import Checkpoint
from difftool.errors import UserError, did_you_mean
from difftool.surgery.families import FAMILIES, NO_STREAM, Family, Readers
from difftool.surgery.targets import load_target, target_names

QUANTISED_BESIDE_ATTENTION = ("mxfp4",)  # leaves attention and norms in floating point
AUTO: dict[str, Any] = {
    "AutoModel": MODEL_MAPPING,
    "AutoModelForCausalLM": MODEL_FOR_CAUSAL_LM_MAPPING,
    "AutoModelForSequenceClassification": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "AutoModelForTokenClassification": MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
}
FLOATS = ("BF16", "F16", "F32", "F64")
# What transformers raises where the values of a config make no sense
CONFIG_FAULTS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    StrictDataclassError,
)


@dataclass(frozen=True)
class Geometry:
    """Sizes of the attention: `heads` softmax heads over `kv_heads`, each `head_dim` wide."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Host:
    """The model that a target is grafted onto.

    Attributes:
        model_type: of the family, without the targets grafted before ("llama").
        targets: the targets that the checkpoint already has.
        config: config.json as it stands.
        prefix: what precedes the base model's names in the checkpoint ("model.", or "").
        dtype: the floating dtype that most bytes have, in safetensors' spelling.
    """

    model_type: str
    family: Family
    targets: tuple[str, ...]
    architecture: str
    config: dict[str, Any]
    geometry: Geometry
    prefix: str
    dtype: str

    @property
    def readers(self) -> Readers:
        if self.config.get("use_parallel_residual", False) and self.family.parallel_readers:
            return self.family.parallel_readers
        return self.family.readers

    @property
    def layer_prefix(self) -> str:
        """What precedes a decoder layer's number in tensor names ("model.layers.")."""
        return f"{self.prefix}{self.family.layers}."


def read_host(checkpoint: Checkpoint) -> Host:
    """Tell what model a checkpoint holds.

    Raises:
        UserError: unknown or unsuitable architecture, quantised weights, a wrapper around a
            language model, or a config that transformers rejects.
    """
    config = checkpoint.config
    _refuse_wrapper(config)
    model_type, family = _find_family(config)
    _refuse_quantised(config)
    targets = _find_targets(config)
    resolved = resolve_config(config)
    prefix = _find_prefix(checkpoint, family)
    return Host(
        model_type=model_type,
        family=family,
        targets=targets,
        architecture=_find_architecture(config, prefix),
        config=config,
        geometry=read_geometry(resolved),
        prefix=prefix,
        dtype=_find_dtype(checkpoint),
    )


def resolve_config(config: dict[str, Any]) -> PretrainedConfig:
    """Return the family's own config object, defaults filled in and old spellings understood."""
    plain = copy.deepcopy(config)  # transformers writes new spellings into its rope_scaling
    for key in ("auto_map", "model_type"):
        plain.pop(key, None)
    if "diffv2" in plain:  # some hosts check sizes against hidden_size / heads: true of the pairs
        plain["num_attention_heads"] = plain["diffv2"]["num_heads"]
    model_type = config.get("host_model_type", config["model_type"])
    try:
        resolved = CONFIG_MAPPING[model_type].from_dict(plain)
    except CONFIG_FAULTS as error:
        raise rejected(model_type, error) from error
    if "diffv2" in plain:
        resolved.num_attention_heads = config["num_attention_heads"]
    return resolved


def rejected(model_type: str, error: Exception) -> UserError:
    """Return the error to raise when transformers can do nothing with a config."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError):
        reason = f"it has no {reason}"
    return UserError(
        f"transformers rejects the config.json of this {model_type} model: {reason}",
        fix="Take config.json and weights from one revision of the same model",
    )


def read_geometry(resolved: PretrainedConfig) -> Geometry:
    """Return the sizes of a config whose defaults are filled in."""
    heads = resolved.num_attention_heads
    return Geometry(
        layers=resolved.num_hidden_layers,
        hidden_size=resolved.hidden_size,
        heads=heads,
        kv_heads=getattr(resolved, "num_key_value_heads", None) or heads,
        head_dim=getattr(resolved, "head_dim", None) or resolved.hidden_size // heads,
    )


def _refuse_wrapper(config: dict[str, Any]) -> None:
    inner, model_type = config.get("text_config"), config.get("model_type")
    if not isinstance(inner, dict) or model_type in NO_STREAM:
        return
    alone = "Save the language model alone (model.language_model.save_pretrained) and convert that"
    raise UserError(
        f"{model_type} wraps a language model ({inner.get('model_type', 'under text_config')}) "
        "together with other towers",
        "a language model of its own",
        alone if inner.get("model_type") in FAMILIES else "",
    )


def _find_family(config: dict[str, Any]) -> tuple[str, Family]:
    model_type = config.get("host_model_type", config.get("model_type"))
    supported = f"one of {', '.join(sorted(FAMILIES))}"
    if not isinstance(model_type, str):
        raise UserError("config.json has no model_type", supported)
    if model_type in FAMILIES:
        return model_type, FAMILIES[model_type]
    why = NO_STREAM.get(model_type)
    if why is None and "auto_map" in config:
        why = "it is defined by code in the checkpoint, which difftool cannot graft onto"
    if why is None and model_type in CONFIG_MAPPING:
        why = "no line in difftool's table of families says where its parts are"
    if why is None:
        why = "neither transformers nor difftool knows this model_type"
    hint = did_you_mean(model_type, FAMILIES).strip()
    raise UserError(f"{model_type} is not supported: {why}", supported, hint)


def _refuse_quantised(config: dict[str, Any]) -> None:
    quantisation = config.get("quantization_config")
    if not quantisation:
        return
    described = isinstance(quantisation, dict)
    method = quantisation.get("quant_method", "unknown") if described else str(quantisation)
    if method in QUANTISED_BESIDE_ATTENTION:
        return
    raise UserError(
        f"the checkpoint is already quantised ({method})",
        "floating-point weights",
        "Convert the model it was made from, then quantise the result",
    )


def _find_targets(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the targets that the config says were grafted, once it says all of each."""
    targets = tuple(name for name in target_names() if name in config)
    for name in targets:
        settings, needed = config[name], load_target(name).CONFIG_KEYS
        if not isinstance(settings, dict) or not settings.keys() >= set(needed):
            raise UserError(
                f"{name!r} in config.json is not what difftool writes there",
                f"a table with {', '.join(needed)}",
                "Restore config.json, or convert the source again",
            )
    return targets


def _find_prefix(checkpoint: Checkpoint, family: Family) -> str:
    if not checkpoint.names:
        return _usual_prefix(checkpoint.config)
    pattern = re.compile(rf"(.*?){re.escape(family.layers)}\.0\.")
    for name in checkpoint.names:
        if match := pattern.match(name):
            return match[1]
    raise UserError(
        f"{checkpoint.path} has no tensor of a decoder layer ({family.layers}.0.…)",
        f"the weights of a {checkpoint.config.get('model_type')} model",
    )


def auto_classes(config: dict[str, Any]) -> dict[str, Any]:
    """Return transformers' classes of the family, by the Auto class that finds them."""
    resolved = type(resolve_config(config))
    found = {auto: mapping[resolved] for auto, mapping in AUTO.items() if resolved in mapping}
    return {auto: cls for auto, cls in found.items() if isinstance(cls, type)}


def _usual_prefix(config: dict[str, Any]) -> str:
    """Return the prefix that transformers saves, for a config without weights or index."""
    base = auto_classes(config)["AutoModel"]
    named = config.get("architectures") or ()
    return "" if base.__name__ in named else f"{base.base_model_prefix}."


def _find_architecture(config: dict[str, Any], prefix: str) -> str:
    """Return the class that the weights belong to, as transformers names it.

    Raises:
        UserError: the config names a class that is not one of the family's in transformers.
    """
    classes = auto_classes(config)
    known = sorted(cls.__name__ for cls in classes.values())
    listed = config.get("architectures")
    first = listed[0] if isinstance(listed, list) and listed else listed or None
    named = config.get("host_architecture") or first
    if named is None:
        return str(classes["AutoModelForCausalLM" if prefix else "AutoModel"].__name__)
    if named not in known:
        raise UserError(
            f"config.json names the architecture {named}",
            f"a class that transformers has for it: {', '.join(known)}",
        )
    return str(named)


def _find_dtype(checkpoint: Checkpoint) -> str:
    """Return the floating dtype of most bytes; without weights, what the config says."""
    totals = Counter[str]()
    for tensor in checkpoint.tensors.values():
        if tensor.dtype in FLOATS:
            totals[tensor.dtype] += tensor.nbytes
    if totals:
        return totals.most_common(1)[0][0]
    named = str(
        checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "bfloat16"
    )
    return {"float32": "F32", "float16": "F16", "float64": "F64"}.get(named, "BF16")

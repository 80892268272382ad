"""The model classes of a converted checkpoint: the host's own, subclassed and grafted onto.

The module is generated. It ships with the weights for plain transformers, and difftool runs the same
text itself, so that loading a checkpoint made by difftool executes nothing that lies in its folder.
"""

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from difftool import __version__
from difftool.surgery.host import AUTO_CLASSES, Host, resolve_config
from difftool.surgery.targets import load_target


@dataclass(frozen=True)
class Shim:
    """The generated module: its name, its text, and what config.json says of it."""

    module: str
    source: str
    model_type: str
    architecture: str
    auto_map: dict[str, str]


def build_shim(host: Host, targets: tuple[str, ...]) -> Shim:
    """Write the classes of `host` with `targets` grafted on, base model and architecture."""
    loaded = [load_target(name) for name in targets]
    prefix = "".join(target.CLASS_PREFIX for target in loaded)
    mixins = ", ".join(target.MIXIN for target in loaded)
    model_type = "_".join((*targets, host.model_type))
    config = type(resolve_config(host.config))
    autos = {
        auto: mapping[config].__name__
        for auto, mapping in AUTO_CLASSES.items()
        if config in mapping and mapping[config].__name__ == host.architecture
    }
    autos = {"AutoModel": AUTO_CLASSES["AutoModel"][config].__name__, **autos}
    module = f"modeling_{model_type}"
    hosts = sorted({config.__name__, *autos.values()})
    body = [
        line.format(config=config.__name__)
        for line in (f'model_type = "{model_type}"', *(t.CONFIG_BODY for t in loaded))
        if line
    ]
    lines = [
        f'"""{host.architecture} with {" and ".join(t.TITLE for t in loaded)}.',
        "",
        f"Written by difftool {__version__}; needs only torch and transformers, to load with",
        f'trust_remote_code=True. The host model is transformers\' own.\n"""',
        "",
        f"from transformers import AutoModel, {', '.join(hosts)}",
        *_conversion_import(host),
        "",
        *(
            f"from .modeling_{name} import {', '.join(target.IMPORTS)}"
            for name, target in zip(targets, loaded, strict=True)
        ),
        *_class(f"{prefix}{config.__name__}", config.__name__, body),
        *(
            line
            for name in dict.fromkeys(autos.values())
            for line in _class(
                f"{prefix}{name}", f"{mixins}, {name}", [f"config_class = {prefix}{config.__name__}"]
            )
        ),
        "",
        "",
        f"AutoModel.register({prefix}{config.__name__}, {prefix}{autos['AutoModel']}, exist_ok=True)",
        *_conversion_registration(host, model_type),
        "",
    ]
    names = {"AutoConfig": config.__name__, **autos}
    return Shim(
        module=module,
        source="\n".join(lines),
        model_type=model_type,
        architecture=f"{prefix}{host.architecture}",
        auto_map={auto: f"{module}.{prefix}{name}" for auto, name in names.items()},
    )


def run_shim(shim: Shim) -> ModuleType:
    """Execute a generated module as part of difftool, beside the modelling code that it imports."""
    name = f"difftool.surgery.targets.{shim.module}"
    known = sys.modules.get(name)
    if known is not None and known.__dict__.get("SOURCE") == shim.source:
        return known
    module = ModuleType(name)
    module.__dict__.update(__package__="difftool.surgery.targets", SOURCE=shim.source)
    sys.modules[name] = module
    exec(compile(shim.source, f"<{shim.module}>", "exec"), module.__dict__)
    return module


def _class(name: str, bases: str, body: list[str]) -> list[str]:
    return ["", "", f"class {name}({bases}):", *(f"    {line}" for line in body)]


def _has_conversion(host: Host) -> bool:
    return get_checkpoint_conversion_mapping(host.model_type) is not None


def _conversion_import(host: Host) -> list[str]:
    if not _has_conversion(host):
        return []
    return [
        "from transformers.conversion_mapping import (",
        "    get_checkpoint_conversion_mapping,",
        "    register_checkpoint_conversion_mapping,",
        ")",
    ]


def _conversion_registration(host: Host, model_type: str) -> list[str]:
    """Experts are stored apart and fused when loading, by a table under the host's model_type."""
    if not _has_conversion(host):
        return []
    return [
        "register_checkpoint_conversion_mapping(",
        f'    "{model_type}", get_checkpoint_conversion_mapping("{host.model_type}"), overwrite=True',
        ")",
    ]


def model_class(host: Host) -> Any:
    """Return the class that loads a checkpoint: the host's, or the generated one if grafted onto."""
    if host.targets:
        shim = build_shim(host, host.targets)
        return getattr(run_shim(shim), shim.architecture)
    config = type(resolve_config(host.config))
    return next(
        mapping[config]
        for mapping in AUTO_CLASSES.values()
        if config in mapping and mapping[config].__name__ == host.architecture
    )

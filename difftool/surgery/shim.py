"""The model classes of a converted checkpoint: the host's own, subclassed and grafted onto.

The module is generated. It ships with the weights for plain transformers, and difftool runs the
same text itself, so that loading a checkpoint made by difftool executes nothing that lies in it.
"""

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from difftool import __version__
from difftool.surgery.host import Host, auto_classes, resolve_config
from difftool.surgery.targets import load_target

MODULE = '''"""{architecture} with {titles}.

Written by difftool {version}. Needs only torch and transformers, whose own classes these extend;
load it with trust_remote_code=True.
"""

from transformers import {host_classes}
{imports}


class {config}({host_config}):
    model_type = "{model_type}"
{config_body}{classes}

AutoModel.register({config}, {base}, exist_ok=True)
{registration}'''

CLASS = """

class {name}({bases}):
    config_class = {config}
"""

# transformers renames old spellings and fuses experts that are stored apart while it loads them, by
# tables under the model_type and the name of a class.
CONVERSION_IMPORT = """from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import WeightRenaming
"""
CONVERSION = '''

def conversion_of(host):
    """Return the table by which the host's tensors are renamed when loaded, and back when saved.

    On the way back a dot would stand for any character, so that ".mlp." took "mlp_res" for "mlp".
    """
    rules = get_checkpoint_conversion_mapping(host)
    for number, rule in enumerate(rules):
        if type(rule) is WeightRenaming:
            names = [name.replace(".", r"\\.") for name in rule.target_patterns]
            rules[number] = WeightRenaming(rule.source_patterns, names)
    return rules


'''
CONVERSION_REGISTRATION = """register_checkpoint_conversion_mapping(
    "{name}", conversion_of("{host}"), overwrite=True
)
"""


@dataclass(frozen=True)
class Shim:
    """The generated module: its name, its text, and what config.json says of it."""

    module: str
    source: str
    model_type: str
    architecture: str
    auto_map: dict[str, str]


def build_shim(host: Host, targets: tuple[str, ...]) -> Shim:
    """Write the classes of `host` with `targets` grafted on: base model and architecture."""
    loaded = {name: load_target(name) for name in targets}
    prefix = "".join(target.CLASS_PREFIX for target in loaded.values())
    model_type = "_".join((*targets, host.model_type))
    host_config = type(resolve_config(host.config)).__name__
    autos = {
        auto: cls.__name__
        for auto, cls in auto_classes(host.config).items()
        if auto == "AutoModel" or cls.__name__ == host.architecture
    }
    mixins = [target.MIXIN for target in loaded.values()]
    body = [line for target in loaded.values() for line in target.CONFIG_BODY]
    renamed = {host.model_type: model_type, **{name: prefix + name for name in autos.values()}}
    tables = [name for name in renamed if get_checkpoint_conversion_mapping(name) is not None]
    config = f"{prefix}{host_config}"
    source = MODULE.format(
        architecture=host.architecture,
        titles=" and ".join(target.TITLE for target in loaded.values()),
        version=__version__,
        host_classes=", ".join(sorted({"AutoModel", host_config, *autos.values()})),
        imports=(CONVERSION_IMPORT if tables else "")
        + "".join(
            f"\nfrom .modeling_{name} import {', '.join(target.IMPORTS)}"
            for name, target in loaded.items()
        ),
        config=config,
        host_config=host_config,
        model_type=model_type,
        config_body="".join(f"    {line.format(config=host_config)}\n" for line in body),
        classes="".join(
            CLASS.format(name=f"{prefix}{name}", bases=", ".join((*mixins, name)), config=config)
            for name in dict.fromkeys(autos.values())
        ),
        base=f"{prefix}{autos['AutoModel']}",
        registration=(CONVERSION if tables else "")
        + "".join(CONVERSION_REGISTRATION.format(name=renamed[name], host=name) for name in tables),
    )
    module = f"modeling_{model_type}"
    return Shim(
        module=module,
        source=source,
        model_type=model_type,
        architecture=f"{prefix}{host.architecture}",
        auto_map={
            auto: f"{module}.{prefix}{name}"
            for auto, name in {"AutoConfig": host_config, **autos}.items()
        },
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


def model_class(host: Host) -> Any:
    """Return the class that loads a checkpoint: the host's, or the generated one if grafted."""
    if host.targets:
        shim = build_shim(host, host.targets)
        return getattr(run_shim(shim), shim.architecture)
    classes = auto_classes(host.config).values()
    return next(cls for cls in classes if cls.__name__ == host.architecture)

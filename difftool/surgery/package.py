"""The files beside the weights: config, model code, tokenizer, model card."""

import json
import shutil
from pathlib import Path
from typing import Any

from difftool.surgery.shim import Shim
from difftool.surgery.targets import modeling_file

CARRIED = ("*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "*.txt", "LICENSE*", "NOTICE*")
NOT_CARRIED = ("config.json", "model.safetensors.index.json", "difftool.json")


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json."""
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def write_code(folder: Path, shim: Shim, targets: tuple[str, ...]) -> None:
    """Write the generated classes and, verbatim, the modelling code of each target."""
    (folder / f"{shim.module}.py").write_text(shim.source, encoding="utf-8")
    for name in targets:
        shutil.copyfile(modeling_file(name), folder / modeling_file(name).name)


def carry_files(source: Path, folder: Path) -> list[str]:
    """Copy tokenizer, chat template, generation config and licence; return their names."""
    names = {path.name for pattern in CARRIED for path in source.glob(pattern) if path.is_file()}
    carried = sorted(names - set(NOT_CARRIED))
    for name in carried:
        shutil.copyfile(source / name, folder / name)
    if (source / "chat_templates").is_dir():
        shutil.copytree(source / "chat_templates", folder / "chat_templates")
    return carried

"""The files beside the weights: config, model code, tokenizer, model card."""

import json
import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_relative_import_files

from difftool.errors import UserError
from difftool.surgery.loading import load_tokenizer
from difftool.surgery.shim import Shim
from difftool.surgery.targets import modeling_file
from difftool.weights import is_plain_name, read_json

SAMPLE = "The quick brown fox, 12345 times:\n    naïve café – 你好 <|x|>"

CARRIED = (
    "*.json",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "tokenizer.model",
    "*.tiktoken",
    "*.txt",
    "LICENSE*",
    "NOTICE*",
)
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


def keep_tokenizer_class(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write down the class that the source's tokenizer had.

    For some families transformers overrides the class that the checkpoint names (Phi-3, Qwen2 and
    others are known to name a wrong one), by a model_type that the converted folder no longer has.

    Raises:
        UserError: the folder's tokenizer reads a text differently all the same.
    """
    if _reads_alike(folder, tokenizer):
        return
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.exists() else {}
    used = type(tokenizer).__name__
    if "auto_map" not in settings:
        settings["tokenizer_class"] = used
        path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", "utf-8")
    if not _reads_alike(folder, tokenizer):
        raise UserError(
            f"the tokenizer ({used}) reads a text differently once it is copied",
            fix="Save it with save_pretrained beside the source's weights, and convert again",
        )


def _reads_alike(folder: Path, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether plain transformers finds the same class in `folder`, and the same token ids."""
    path = folder / "tokenizer_config.json"
    is_code = path.exists() and "auto_map" in read_json(path)
    carried = load_tokenizer(folder, is_code, as_host=False)
    return type(carried).__name__ == type(tokenizer).__name__ and (
        carried(SAMPLE)["input_ids"] == tokenizer(SAMPLE)["input_ids"]  # type: ignore[misc]
    )


def carry_files(source: Path, folder: Path) -> list[str]:
    """Copy tokenizer, chat template, generation config and licence; return their names."""
    found = {path for pattern in CARRIED for path in source.glob(pattern)}
    found |= set(_tokenizer_code(source))
    names = {path.relative_to(source).as_posix() for path in found if path.is_file()}
    carried = sorted(names - set(NOT_CARRIED))
    for name in carried:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, folder / name)
    return carried


def _tokenizer_code(source: Path) -> list[Path]:
    """Return the Python files that tokenizer_config.json names and what they import beside them.

    They are copied, not run: whoever loads the result decides that anew.
    """
    settings = source / "tokenizer_config.json"
    named = read_json(settings).get("auto_map") if settings.is_file() else None
    classes = named.get("AutoTokenizer") if isinstance(named, dict) else named
    classes = classes if isinstance(classes, list) else [classes]
    modules = [name.partition(".")[0] for name in classes if isinstance(name, str)]
    files = [source / f"{name}.py" for name in modules if is_plain_name(name)]
    files = [file for file in files if file.is_file()]
    imported = [source / name for file in files for name in get_relative_import_files(file)]
    return files + [file for file in imported if file.parent == source]

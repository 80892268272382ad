"""Which files of a checkpoint folder hold its weights: an index's shards, or one file, or a set."""

import json
import re
from pathlib import Path
from typing import Any

from difftool.errors import UserError
from difftool.header import DOWNLOAD_AGAIN, unique_keys

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
NOT_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state|random_states).*")


def find_shards(path: Path) -> tuple[tuple[str, ...], dict[str, Any] | None]:
    """Return the names of the shard files in order, and the index if there is one.

    No names mean a folder without weights. What is missing, ambiguous or unsafe is a UserError.
    """
    present = sorted(file.name for file in path.glob("[!.]*.safetensors"))
    if (path / INDEX).is_file():
        index = read_json(path / INDEX, unique=True)
        return _indexed(path, _checked_weight_map(path / INDEX, index), present), index
    if SINGLE in present:
        return (_checked_file(path, SINGLE),), None
    if present == [ADAPTER]:
        raise UserError(
            f"{path} holds an adapter ({ADAPTER}), not a whole model",
            fix="Merge it into its base model first, with PEFT's merge_and_unload",
        )
    if not present:
        _refuse_pickles(path)
    return _unindexed(path, [name for name in present if name != ADAPTER]), None


def read_json(path: Path, *, unique: bool = False) -> dict[str, Any]:
    """Read a file that must hold a JSON object; a UserError says on which line it does not.

    With `unique`, a key that stands in one object twice is an error too.
    """
    try:
        text = path.read_bytes().decode()
        value = json.loads(text, object_pairs_hook=unique_keys if unique else None)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        where = f"{error.msg} on line {error.lineno}, column {error.colno}"
        raise UserError(f"{path} is not valid JSON: {where}", fix=DOWNLOAD_AGAIN) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}", fix=DOWNLOAD_AGAIN) from error
    if not isinstance(value, dict):
        raise UserError(
            f"{path} holds a JSON {type(value).__name__}", "a JSON object", DOWNLOAD_AGAIN
        )
    return value


def is_plain_name(name: str) -> bool:
    """Whether `name` is a file name and nothing more on any system: no folder, drive or NUL."""
    return name not in ("", ".", "..") and not set(name) & set("/\\:\0")


def _checked_weight_map(path: Path, index: dict[str, Any]) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{path} has no weight_map", "a table from tensor to file", DOWNLOAD_AGAIN)
    for name, file in weight_map.items():
        if not isinstance(file, str) or not is_plain_name(file):
            raise UserError(
                f"{path} puts tensor {name!r} into {file!r}",
                "the plain name of a file beside the index",
                "Do not use this checkpoint: such an index may point outside its folder",
            )
        if not file.endswith(".safetensors"):
            raise UserError(f"{path} puts tensor {name!r} into {file!r}", "a .safetensors file")
    return weight_map


def _indexed(path: Path, weight_map: dict[str, str], present: list[str]) -> tuple[str, ...]:
    files = sorted(set(weight_map.values()))
    if not present:
        return ()
    if SINGLE in present and SINGLE not in files:
        raise UserError(
            f"{path} is ambiguous: it has {SINGLE} and an index that names other files",
            fix=f"Remove {SINGLE}, or {INDEX} and its shards",
        )
    return tuple(_checked_file(path, file) for file in files)


def _checked_file(path: Path, file: str) -> str:
    if not (path / file).is_file():
        raise UserError(
            f"{path} lacks the shard {file}", fix="Download it, and check the disk space"
        )
    return file


def _unindexed(path: Path, present: list[str]) -> tuple[str, ...]:
    """Accept one file of any name, or one set of numbered parts that is complete."""
    names = present
    if present and (part := PART.fullmatch(present[0])):
        numbers = range(1, int(part["count"]) + 1)
        names = [f"{part['stem']}-{n:05}-of-{part['count']}.safetensors" for n in numbers]
    if not set(present) <= set(names) or (len(present) > 1 and names is present):
        raise UserError(
            f"{path} is ambiguous: it has {', '.join(present[:4])}, and no {INDEX}",
            fix="Leave one checkpoint in the folder, or add the index",
        )
    return tuple(_checked_file(path, name) for name in names)


def _refuse_pickles(path: Path) -> None:
    pickles = [
        file.name
        for file in sorted(path.iterdir())
        if file.suffix in PICKLES and not NOT_WEIGHTS.fullmatch(file.name)
    ]
    if pickles:
        raise UserError(
            f"{path} has its weights only as pickles ({', '.join(pickles[:3])})",
            "safetensors: a pickle can run any code, so difftool never opens one",
            "Take a revision with safetensors, or load the model with transformers where you trust "
            "it and call save_pretrained",
        )

"""Tasks that lie in a folder: the user's own YAMLs, and data of the kinds that difftool knows.

A task is configured as lm-evaluation-harness has it (its docs/new_task_guide.md), with two
differences. Data files are named relative to the folder. And nothing that a YAML names may lead out
of the folder or run code, unless the user trusts it. `tasks/README.md` beside this file tells more.
"""

import glob
import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from difftool.errors import UserError

Config = dict[str, Any]

KINDS = Path(__file__).resolve().parent / "tasks"  # a YAML for each kind
BUILDERS = ("json", "csv", "text", "parquet")  # of datasets, that read plain files
FILE_SETTINGS = {"data_files", "field", "delimiter", "sep", "encoding", "sample_by"}
CODE = ("class", "custom_dataset", "use_prompt", "unsafe_code")  # lead to code, or to any file
RIGHT, WRONG = "correct.txt", "wrong.txt"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_TRUST = "Read that code, then pass --trust-remote-code"


@dataclass(frozen=True)
class Function:
    """A `!function module.name` of a YAML, not looked up yet."""

    text: str


class _Loader(yaml.SafeLoader):
    """Reads a YAML without running anything."""


_Loader.add_constructor("!function", lambda loader, node: Function(str(node.value)))


@dataclass(frozen=True)
class TaskFolder:
    """A folder with tasks.

    Attributes:
        path: where it lies; data files are relative to it.
        trusted: whether Python code in it may run.
        scratch: an empty folder, for data that is rewritten and for the cache of datasets.
    """

    path: Path
    trusted: bool
    scratch: Path

    @cached_property
    def entries(self) -> dict[str, Path | tuple[str, ...]]:
        """What can be asked for: a YAML, a folder of pairs, or the tasks of a group or tag.

        The folder's own YAMLs come before those of difftool. One that cannot be read goes by the
        name of its file, so that whoever asks for it is told.

        Raises:
            UserError: no such folder.
        """
        if not self.path.is_dir():
            raise UserError(f"the folder of tasks {self.path} does not exist", "a folder")
        found: dict[str, Path] = {}
        for kind in sorted(KINDS.glob("*.yaml")):
            config = read_yaml(kind)
            if all((self.path / name).is_file() for name in _names(config["dataset_kwargs"])):
                found[config["task"]] = kind
        for right in sorted(self.path.glob(f"*/{RIGHT}")):
            if right.with_name(WRONG).is_file():
                found[right.parent.name] = right.parent
        members: dict[str, list[str]] = {}
        for path in sorted(self.path.rglob("*.yaml")):
            try:
                config = read_yaml(path)
            except UserError:
                found.setdefault(path.stem, path)
                continue
            if isinstance(task := config.get("task"), str):
                found[task] = path
                for tag in _names(config.get("tag")):
                    members.setdefault(tag, []).append(task)
            elif isinstance(group := config.get("group"), str):
                members[group] = [str(member) for member in task or []]
        return {name: tuple(some) for name, some in members.items()} | found

    def configurations(self, name: str) -> list[Config]:
        """Return what the harness needs to know of each task that a name of `entries` stands for.

        Raises:
            UserError: data or an included file is missing or outside the folder, or a YAML asks for
                code to be run.
        """
        entry = self.entries[name]
        if isinstance(entry, Path):
            return [self._pairs(entry) if entry.is_dir() else self._configuration(entry)]
        members = [self.entries.get(member) for member in entry]
        for member, path in zip(entry, members, strict=True):
            if not isinstance(path, Path):
                raise UserError(f"{name} names {member}, which is no task in {self.path}")
        return [config for member in entry for config in self.configurations(member)]

    def _configuration(self, path: Path) -> Config:
        config = self._merged(self._inside(path, self.path), ())
        for key in ("tag", "group", "task_list"):
            config.pop(key, None)
        if not self.trusted:
            for key, value in config.items():
                if key in CODE or any(isinstance(part, Function) for part in _parts(value)):
                    raise UserError(f"{path} runs Python code: {key}", "templates only", _TRUST)
        return self._data(path, config)

    def _merged(self, path: Path, including: tuple[Path, ...]) -> Config:
        """Return a YAML's settings over those of the files that it includes."""
        config = read_yaml(path)
        if self.trusted:
            config = _with_functions(config, path)
        included = config.pop("include", [])
        merged: Config = {}
        for name in included if isinstance(included, list) else [included]:
            other = self._included(path, str(name))
            if other in (path, *including):
                raise UserError(f"{path} includes itself, through {name}")
            merged |= self._merged(other, (path, *including))
        return merged | config

    def _included(self, path: Path, name: str) -> Path:
        """Return the file beside the YAML, or else difftool's of that name."""
        kind = KINDS / name
        own = path.parent / name
        if not own.is_file() and kind.parent == KINDS and kind.is_file():
            return kind
        return self._inside(own, path)

    def _inside(self, file: Path, named_in: Path) -> Path:
        """Return an existing file of the folder (or of difftool's), where no link leads outside."""
        target = file.resolve()
        if not any(target.is_relative_to(root.resolve()) for root in (self.path, KINDS)):
            raise UserError(
                f"{named_in} names {file}, which leads outside {self.path}",
                "files of that folder",
                "Copy it there",
            )
        if not target.is_file():
            raise UserError(f"{named_in} names {file}, which does not exist", "a file")
        return target

    def _data(self, path: Path, config: Config) -> Config:
        """Return the configuration with its data files as absolute paths."""
        source, settings = config.get("dataset_path"), dict(config.get("dataset_kwargs") or {})
        if source not in BUILDERS:
            on_hub = _HUB_ID.fullmatch(str(source)) and not Path(str(source)).exists()
            if not self.trusted and (settings or not on_hub):
                raise UserError(
                    f"{path} has the dataset_path {source!r}",
                    f"{', '.join(BUILDERS)} with data_files, or the id of a dataset on the hub",
                )
            return config
        unknown = ", ".join(sorted(settings.keys() - FILE_SETTINGS))
        if (unknown and not self.trusted) or "data_files" not in settings:
            raise UserError(
                f"{path} has {unknown or 'no data_files'} in dataset_kwargs",
                f"data_files, and perhaps {', '.join(sorted(FILE_SETTINGS - {'data_files'}))}",
            )

        def locate(name: str) -> str:  # datasets takes *, ? and [ for patterns
            return glob.escape(str(self._inside(self.path / name, path)))

        settings["data_files"] = _map_names(settings["data_files"], locate)
        return {**config, "dataset_kwargs": {**settings, "cache_dir": str(self.scratch / "cache")}}

    def _pairs(self, folder: Path) -> Config:
        """Return the task of telling each line of correct.txt from that of wrong.txt."""
        right, wrong = (
            self._inside(folder / name, folder).read_text(encoding="utf-8").splitlines()
            for name in (RIGHT, WRONG)
        )
        if len(right) != len(wrong):
            raise UserError(
                f"{folder} has {len(right)} lines in {RIGHT} and {len(wrong)} in {WRONG}",
                "as many in both",
            )
        rows = [split_pair(one, other) for one, other in zip(right, wrong, strict=True)]
        data = self.scratch / f"{folder.name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        settings = {
            "data_files": {"test": glob.escape(str(data))},
            "cache_dir": str(self.scratch / "cache"),
        }
        kind = read_yaml(KINDS / "hellaswag.yaml")
        return {**kind, "task": folder.name, "dataset_kwargs": settings}


def read_yaml(path: Path) -> Config:
    """Return the settings in a YAML; functions that it names are not looked up."""
    try:
        config = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the task {path} cannot be read: {reason}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a task", "a YAML of settings: task, dataset_path, …")
    return config


def split_pair(right: str, wrong: str) -> Config:
    """Return what two texts share, up to a whole word, as the query, and how each goes on."""
    words = [line.split(" ") for line in (right, wrong)]
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*words, strict=False)))
    same = min(same, *(len(line) - 1 for line in words))  # something must be left to score
    return {
        "query": " ".join(words[0][:same]),
        "choices": [" ".join(line[same:]) for line in words],
        "gold": 0,
    }


def _names(value: Any) -> list[str]:
    """Return all strings in a setting."""
    return [part for part in _parts(value) if isinstance(part, str)]


def _map_names(names: Any, change: Callable[[str], str]) -> Any:
    """Return data_files, which is a name, a list of them, or either for each split, changed."""
    if isinstance(names, dict):
        return {split: _map_names(some, change) for split, some in names.items()}
    if isinstance(names, list):
        return [change(str(name)) for name in names]
    return change(str(names))


def _parts(value: Any) -> Iterator[Any]:
    """Yield a value and all that it holds."""
    yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in inner:
        yield from _parts(part)


def _with_functions(value: Any, path: Path) -> Any:
    """Return a setting with its functions imported: from a file beside the YAML, or a module."""
    if isinstance(value, dict):
        return {key: _with_functions(part, path) for key, part in value.items()}
    if isinstance(value, list):
        return [_with_functions(part, path) for part in value]
    return _import(value.text, path) if isinstance(value, Function) else value


def _import(text: str, path: Path) -> Any:
    module, _, name = text.rpartition(".")
    file = path.parent / f"{module.replace('.', '/')}.py"
    try:
        if not file.is_file():
            return getattr(importlib.import_module(module), name)
        spec = importlib.util.spec_from_file_location(f"difftool_task_{file.stem}", file)
        assert spec is not None and spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return getattr(loaded, name)
    except (ImportError, ValueError, AttributeError) as error:
        raise UserError(f"{path} names the function {text}: {error}") from error

"""What a user may name -> a checkpoint folder: a folder, hub id, alias, GGUF file, or `tiny`."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Literal

from difftool.aliases import ALIASES, Alias
from difftool.errors import UserError, did_you_mean, name_some, suggest_sibling
from difftool.gguf import GGUF_DTYPES, converted_gguf
from difftool.hub import (
    PICKLES,
    download,
    find_cached,
    find_local,
    hub_cache,
    read_json_or_nothing,
)

ACCEPTED = "A source is a folder, ORG/NAME on the hub, a .gguf file, an alias, or tiny"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/\w[\w.-]*", re.ASCII)
REVISION = re.compile(r"\w[\w./+-]*", re.ASCII)


@dataclass(frozen=True)
class Source:
    """A checkpoint folder and how the user came to it.

    Attributes:
        name: short name for outputs: folder name, last part of the hub id, stem of the GGUF file.
        id: what provenance records, free of local paths: hub id, `tiny`, folder or file name.
        revision: the hub commit, or None for anything that did not come from the hub.
        path: the local folder; for a GGUF file a temporary one.
        kind: which of the four it was.
    """

    name: str
    id: str
    revision: str | None
    path: Path
    kind: Literal["folder", "hub", "gguf", "tiny"]


@dataclass(frozen=True)
class ModelRow:
    """One line of `difftool models`; `alias` is empty for a cached model that has none."""

    alias: str
    hub_id: str
    parameters: str
    family: str
    gated: bool
    local: Path | None


@contextmanager
def open_source(
    text: str, *, revision: str | None = None, dtype: str | None = None, allow_network: bool = True
) -> Iterator[Source]:
    """Yield the checkpoint that ``text`` names; what was made only for it is removed at the end.

    The first that fits: `tiny` (a folder of that name is written ``./tiny``), an existing folder, a
    `.gguf` file, an alias or the last part of an alias's hub id in any case, a hub id. Aliases and
    hub ids take ``@revision``. A model that lies complete in the hub's cache is used from there
    without asking the hub whether there is a newer one.

    Args:
        text: what the user wrote.
        revision: branch, tag or commit on the hub; the same as ``@revision``.
        dtype: one of `GGUF_DTYPES`, for a GGUF file only: its weights are dequantised and
            rounded to it, bfloat16 unless given.
        allow_network: False uses the cache only.

    Raises:
        UserError: nothing of that name, not reachable, not allowed, or not in a readable format.
    """
    path = Path(os.path.expanduser(text))
    word, _, at_revision = text.partition("@")
    alias = find_alias(word)
    from_hub = not os.path.exists(path) and (alias or HUB_ID.fullmatch(word))
    if revision and not from_hub:
        raise UserError(f"{text!r} has no revisions", "Only a model on the hub has")
    if text == "tiny":
        with as_file(files("difftool") / "assets" / "tiny") as folder:
            yield Source("tiny", "tiny", None, _existing_tiny(folder), "tiny")
    elif text and os.path.isdir(path):
        yield _folder_source(path)
    elif path.suffix.lower() == ".gguf":
        with converted_gguf(_existing_file(path), dtype or GGUF_DTYPES[0]) as folder:
            yield Source(path.stem, path.name, None, folder, "gguf")
    elif os.path.isfile(path):
        raise _not_a_checkpoint(path)
    elif from_hub:
        wanted = _one_revision(at_revision, revision)
        yield _hub_source(alias.hub_id if alias else word, wanted, allow_network)
    else:
        raise _unknown(text)


def find_alias(word: str) -> Alias | None:
    """Return the alias called ``word``, or whose hub id ends in it; case does not matter."""
    return _BY_NAME.get(word.casefold())


def list_models() -> list[ModelRow]:
    """Return every alias, then the other models in the hub's cache, and where each one lies.

    Only models that are complete on this machine have a `local` folder. Reads a few small files,
    asks nobody.
    """
    rows = [
        ModelRow(
            name,
            alias.hub_id,
            alias.parameters,
            alias.family,
            alias.gated,
            find_local(alias.hub_id),
        )
        for name, alias in ALIASES.items()
    ]
    known = {alias.hub_id for alias in ALIASES.values()}
    for repository in sorted(hub_cache().glob("models--*--*")):
        hub_id = repository.name.removeprefix("models--").replace("--", "/", 1)
        folder = None if hub_id in known else find_local(hub_id)
        if folder and (family := read_json_or_nothing(folder / "config.json").get("model_type")):
            rows.append(ModelRow("", hub_id, "", str(family), False, folder))
    return rows


_BY_NAME = {alias.hub_id.split("/")[1].casefold(): alias for alias in ALIASES.values()} | ALIASES


def _folder_source(path: Path) -> Source:
    folder = path.resolve()
    ggufs = sorted(file.name for file in folder.glob("*.gguf"))
    if ggufs and not (folder / "config.json").is_file():
        raise UserError(
            f"{path} holds GGUF files and no config.json",
            fix=f"Name one of them: {path / ggufs[0]}",
        )
    return Source(folder.name, folder.name, None, folder, "folder")


def _existing_tiny(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise UserError(
            "This installation of difftool lacks its embedded checkpoint",
            fix="Install difftool again, with its package data",
        )
    return folder


def _existing_file(path: Path) -> Path:
    if not path.is_file():
        raise UserError(f"There is no file {path}", fix=suggest_sibling(path).strip())
    return path.resolve()


def _not_a_checkpoint(path: Path) -> UserError:
    if path.suffix in PICKLES:
        return UserError(
            f"{path} is a pickle, which is never opened",
            "A pickle can run any code",
            "Use the model's safetensors files",
        )
    return UserError(
        f"{path} is a file", "A checkpoint is a folder with a config.json, or a .gguf file",
        f"Name its folder: {path.parent}",
    )  # fmt: skip


def _unknown(text: str) -> UserError:
    path_like = text.startswith((".", "~")) or any(mark in text for mark in ("/", os.sep))
    if path_like:
        return UserError(
            f"There is no folder {text}", ACCEPTED, suggest_sibling(Path(text)).strip()
        )
    hint = did_you_mean(text.casefold(), ["tiny", *_BY_NAME]) or suggest_sibling(Path(text))
    return UserError(
        f"{text!r} is no folder, no alias and no hub id",
        ACCEPTED,
        f"`difftool models` lists the aliases.{hint}",
    )


def _hub_source(hub_id: str, revision: str | None, allow_network: bool) -> Source:
    snapshot = find_cached(hub_id, revision)
    try:
        if snapshot is None or snapshot.absent:
            snapshot = download(hub_id, revision, allow_network)
        elif not snapshot.has_tokenizer:  # a program that wanted the weights alone fetched it
            snapshot = download(hub_id, snapshot.path.name, allow_network)
    except UserError as error:
        if snapshot is None:
            raise
        if snapshot.absent:
            found = f"{hub_id} lies in the hub's cache without {name_some(snapshot.absent)}"
            raise UserError(found, error.found, error.fix) from error
    return Source(hub_id.split("/")[1], hub_id, snapshot.path.name, snapshot.path, "hub")


def _one_revision(at_revision: str, revision: str | None) -> str | None:
    if at_revision and revision and at_revision != revision:
        raise UserError(
            f"Two revisions are asked for: {at_revision} and {revision}", fix="Give one"
        )
    wanted = at_revision or revision
    if wanted and (not REVISION.fullmatch(wanted) or ".." in wanted):
        raise UserError(f"{wanted!r} is no revision", "A branch, a tag or a commit")
    return wanted

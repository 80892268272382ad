"""What a user may name -> a checkpoint folder: a folder, a hub id, an alias, a GGUF file, `tiny`.

Only safetensors, JSON, tokenizer files and licence texts are ever fetched from the hub. The hub's
cache is read here without huggingface_hub, whose view of the environment is fixed at its import.
"""

import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from difftool.aliases import ALIASES, Alias
from difftool.errors import UserError, did_you_mean

GGUF_DTYPES = ("bfloat16", "float16", "float32")

_ACCEPTED = "A source is a folder, ORG/NAME on the hub, a .gguf file, an alias, or tiny"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/\w[\w.-]*", re.ASCII)
_REVISION = re.compile(r"\w[\w./+-]*", re.ASCII)
_WANTED = ["model*.safetensors", "*.json", "*.jinja", "tokenizer.model*", "*.tiktoken"]
_WANTED += ["merges.txt", "vocab.txt", "LICENSE*", "NOTICE*"]
_UNWANTED = ["*/*.safetensors", "*/*.json"]  # copies in other layouts, often as large again
_WEIGHTS = re.compile(r"model[^/]*\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_SECONDS = 10.0  # for the hub to answer at all
_UNREADABLE_GGUF = (
    struct.error,
    ValueError,
    IndexError,
    KeyError,
    OverflowError,
    RuntimeError,
    OSError,
)


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
    from_hub = not os.path.exists(path) and (alias or _HUB_ID.fullmatch(word))
    if revision and not from_hub:
        raise UserError(f"{text!r} has no revisions", "Only a model on the hub has")
    if text == "tiny":
        with as_file(files("difftool") / "assets" / "tiny") as folder:
            yield Source("tiny", "tiny", None, _existing_tiny(folder), "tiny")
    elif text and os.path.isdir(path):
        yield _folder_source(path)
    elif path.suffix.lower() == ".gguf":
        with _converted_gguf(_existing_file(path), dtype or GGUF_DTYPES[0]) as folder:
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
            name, alias.hub_id, alias.parameters, alias.family, alias.gated, _local(alias.hub_id)
        )
        for name, alias in ALIASES.items()
    ]
    known = {alias.hub_id for alias in ALIASES.values()}
    for repository in sorted(hub_cache().glob("models--*--*")):
        hub_id = repository.name.removeprefix("models--").replace("--", "/", 1)
        folder = None if hub_id in known else _local(hub_id)
        if folder and (family := _read_json(folder / "config.json").get("model_type")):
            rows.append(ModelRow("", hub_id, "", str(family), False, folder))
    return rows


def hub_cache() -> Path:
    """Return the hub's cache folder as the environment names it at this moment."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(home, "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(os.path.expandvars(cache or os.path.join(home, "hub"))).expanduser()


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
        raise UserError(f"There is no file {path}", fix=_close_siblings(path).strip())
    return path.resolve()


def _not_a_checkpoint(path: Path) -> UserError:
    if path.suffix in _PICKLES:
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
            f"There is no folder {text}", _ACCEPTED, _close_siblings(Path(text)).strip()
        )
    hint = did_you_mean(text.casefold(), ["tiny", *_BY_NAME]) or _close_siblings(Path(text))
    return UserError(
        f"{text!r} is no folder, no alias and no hub id",
        _ACCEPTED,
        f"`difftool models` lists the aliases.{hint}",
    )


def _close_siblings(path: Path) -> str:
    """Return ``" Did you mean '…'?"`` for what lies beside the missing ``path``, or nothing."""
    parent = Path(os.path.expanduser(path.parent))
    return did_you_mean(path.name, os.listdir(parent)) if os.path.isdir(parent) else ""


@dataclass(frozen=True)
class _Snapshot:
    """A model in the hub's cache; `absent` names what it should hold and does not."""

    path: Path
    absent: tuple[str, ...]

    @property
    def has_tokenizer(self) -> bool:
        return any((self.path / name).is_file() for name in _TOKENIZERS)


def _hub_source(hub_id: str, revision: str | None, allow_network: bool) -> Source:
    snapshot = _cached(hub_id, revision)
    try:
        if snapshot is None or snapshot.absent:
            snapshot = _download(hub_id, revision, allow_network)
        elif not snapshot.has_tokenizer:  # a program that wanted the weights alone fetched it
            snapshot = _download(hub_id, snapshot.path.name, allow_network)
    except UserError as error:
        if snapshot is None:
            raise
        if snapshot.absent:
            found = f"{hub_id} lies in the hub's cache without {_some(snapshot.absent)}"
            raise UserError(found, error.found, error.fix) from error
    return Source(hub_id.split("/")[1], hub_id, snapshot.path.name, snapshot.path, "hub")


def _cached(hub_id: str, revision: str | None) -> _Snapshot | None:
    """Look ``hub_id`` up in the cache: refs/<revision> holds the commit, snapshots/<commit> it."""
    repository = hub_cache() / f"models--{hub_id.replace('/', '--')}"
    reference = repository / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision
    if not commit or not (repository / "snapshots" / commit).is_dir():
        return None
    return _snapshot(repository / "snapshots" / commit)


def _snapshot(folder: Path) -> _Snapshot:
    index = folder / "model.safetensors.index.json"
    mapping = _read_json(index).get("weight_map") if index.is_file() else None
    weights = {str(name) for name in mapping.values()} if isinstance(mapping, dict) else set()
    names = ["config.json", *sorted(weights or {"model.safetensors"})]
    absent = [name for name in names if not (folder / name).is_file()]
    return _Snapshot(folder, tuple(absent))


def _local(hub_id: str) -> Path | None:
    snapshot = _cached(hub_id, None)
    return snapshot.path if snapshot and not snapshot.absent else None


def _download(hub_id: str, revision: str | None, allow_network: bool) -> _Snapshot:
    """Fetch what `_WANTED` matches into the hub's cache; every refusal becomes a UserError.

    `snapshot_download` waits without limit for a hub that does not answer, so `model_info`, which
    does not, goes first; its list of files also tells whether there is anything to download.
    """
    if not allow_network or _offline():
        raise _unreachable(
            hub_id, "offline mode is on" if _offline() else "the network is not used"
        )
    from huggingface_hub import HfApi, errors, snapshot_download
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    endpoint = os.environ.get("HF_ENDPOINT")
    name = f"{hub_id}@{revision}" if revision else hub_id
    page = f"https://huggingface.co/{hub_id}"
    log_in = "`hf auth login` or the environment variable HF_TOKEN"
    try:
        info = HfApi(endpoint=endpoint).model_info(hub_id, revision=revision, timeout=_SECONDS)
        _require_safetensors(hub_id, [file.rfilename for file in info.siblings or []])
        folder = snapshot_download(
            hub_id, revision=revision, cache_dir=hub_cache(), endpoint=endpoint,
            etag_timeout=_SECONDS, allow_patterns=_WANTED, ignore_patterns=_UNWANTED,
        )  # fmt: skip
    except errors.HFValidationError as error:
        raise UserError(f"{hub_id!r} cannot be a hub id", str(error)) from error
    except errors.GatedRepoError as error:
        raise UserError(
            f"{hub_id} is gated: its licence must be accepted first",
            fix=f"Accept it at {page}, then identify yourself with {log_in}",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(
            f"{hub_id} has no revision {revision!r}", fix=f"See {page}/commits"
        ) from error
    except errors.RepositoryNotFoundError as error:
        hint = did_you_mean(hub_id, [alias.hub_id for alias in ALIASES.values()])
        hint = hint or _close_siblings(Path(hub_id))
        raise UserError(
            f"There is no folder {hub_id}, and no such model on the hub, unless it is private",
            fix=f"Check the spelling; for a private model use {log_in}.{hint}",
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise _unreachable(hub_id, str(error.__cause__ or error)) from error
    except errors.HfHubHTTPError as error:
        if error.response.status_code >= 500:
            raise _unreachable(hub_id, f"the hub answered {error.response.status_code}") from error
        raise UserError(
            f"The hub refused {name}: {error}", fix=f"If access is the matter, use {log_in}"
        ) from error
    except (HTTPError, ConnectionError) as error:
        raise _unreachable(hub_id, str(error)) from error
    except OSError as error:
        raise UserError(
            f"{name} could not be stored in {hub_cache()}: {error}",
            fix="Make room there, or set HF_HOME to another folder",
        ) from error
    snapshot = _snapshot(Path(folder))
    if snapshot.absent:
        raise UserError(f"{name} is not whole on the hub: it lacks {_some(snapshot.absent)}")
    return snapshot


def _require_safetensors(hub_id: str, names: list[str]) -> None:
    if any(_WEIGHTS.fullmatch(name) for name in names):
        return
    if any(name.endswith(_PICKLES) for name in names):
        raise UserError(
            f"{hub_id} has its weights as pickles only, which are never opened",
            "A pickle can run any code",
            "Look for a copy of the model in safetensors",
        )
    if ggufs := [name for name in names if name.endswith(".gguf")]:
        raise UserError(
            f"{hub_id} holds GGUF files only",
            fix=f"Run `hf download {hub_id} {ggufs[0]} --local-dir .` and name that file",
        )
    raise UserError(
        f"{hub_id} has no model.safetensors", "The weights must lie as transformers saves them"
    )


def _unreachable(hub_id: str, why: str) -> UserError:
    name = hub_id.split("/")[1]
    patterns = " ".join(f"'{pattern}'" for pattern in _WANTED)
    beside = _close_siblings(Path(hub_id))
    return UserError(
        f"{hub_id} cannot be fetched: the hub is out of reach ({_first_line(why)})",
        fix=f"Where there is a network, run `hf download {hub_id} --local-dir {name} "
        f"--include {patterns}`, and name that folder.{beside}",
    )


def _one_revision(at_revision: str, revision: str | None) -> str | None:
    if at_revision and revision and at_revision != revision:
        raise UserError(
            f"Two revisions are asked for: {at_revision} and {revision}", fix="Give one"
        )
    wanted = at_revision or revision
    if wanted and (not _REVISION.fullmatch(wanted) or ".." in wanted):
        raise UserError(f"{wanted!r} is no revision", "A branch, a tag or a commit")
    return wanted


def _offline() -> bool:
    setting = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return setting.upper() in {"1", "ON", "YES", "TRUE"}


@contextmanager
def _converted_gguf(file: Path, dtype: str) -> Iterator[Path]:
    """Yield a temporary folder with the model of ``file`` as transformers saves it."""
    if dtype not in GGUF_DTYPES:
        raise UserError(
            f"{dtype!r} is no dtype for a GGUF file", f"One of {', '.join(GGUF_DTYPES)}",
            did_you_mean(dtype, GGUF_DTYPES).strip(),
        )  # fmt: skip
    if lacking := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        names = " ".join(lacking)
        raise UserError(f"Reading {file.name} takes {names}", fix=f"Run `pip install {names}`")
    try:
        model, tokenizer = _read_gguf(file, dtype)
    except _UNREADABLE_GGUF as error:
        raise UserError(
            f"{file.name} cannot be read as a GGUF model: {error}",
            fix="Fetch the file again if it may be damaged",
        ) from error
    with tempfile.TemporaryDirectory(prefix="difftool-gguf-") as temporary:
        needed = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
        if shutil.disk_usage(temporary).free < needed:
            raise UserError(
                f"{file.name} unpacks to {needed / 1e9:.1f} GB",
                f"That is more than is free in {Path(temporary).parent}",
                "Set TMPDIR to a folder with more room",
            )
        folder = Path(temporary) / file.stem
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        del model
        _tidy(folder)
        yield folder


def _read_gguf(file: Path, dtype: str) -> tuple[Any, Any]:
    """Return the dequantised model in ``file`` and its tokenizer, which has the chat template."""
    import torch
    import transformers

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "output_loading_info": True}
    if hasattr(transformers, "GgufConfig"):  # from 5.24 weights would otherwise stay packed
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(**where, **options)
    model, loading = loaded
    if wrong := sorted({*loading["missing_keys"], *loading["unexpected_keys"]}):
        raise UserError(
            f"{file.name} is not one whole model: {_some(wrong)} missing or left over",
            "A model split over several GGUF files must be merged first",
            "Run `llama-gguf-split --merge`",
        )
    return model, transformers.AutoTokenizer.from_pretrained(**where)


def _tidy(folder: Path) -> None:
    """Drop what only describes this machine, and give the weights the mode of any new file."""
    for name, keys in (
        ("config.json", ("_name_or_path", "_model_name_or_path")),
        ("tokenizer_config.json", ("is_local", "local_files_only", "name_or_path")),
    ):
        values = _read_json(folder / name)
        kept = {key: value for key, value in values.items() if key not in keys}
        (folder / name).write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n")
    mode = (folder / "config.json").stat().st_mode
    for weights in folder.glob("*.safetensors"):
        weights.chmod(mode)


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in ``path``, empty when it is not JSON: such a file counts as absent."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _some(names: tuple[str, ...] | list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _first_line(message: str) -> str:
    return (message.strip() or "no answer").splitlines()[0]

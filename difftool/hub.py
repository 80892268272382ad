"""Models on the Hugging Face hub: in its cache on this machine, or fetched into it.

Only safetensors, JSON, tokenizer files and licence texts are ever fetched. The cache is read here
without huggingface_hub, whose view of the environment is fixed at its import.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from difftool.aliases import ALIASES
from difftool.errors import UserError, did_you_mean, name_some, suggest_sibling

WANTED = ["model*.safetensors", "*.json", "*.jinja", "tokenizer.model*", "*.tiktoken"]
WANTED += ["merges.txt", "vocab.txt", "LICENSE*", "NOTICE*"]
UNWANTED = ["*/*.safetensors", "*/*.json"]  # copies in other layouts, often as large again
WEIGHTS = re.compile(r"model[^/]*\.safetensors")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
ANSWER_SECONDS = 10.0  # for the hub to answer at all


@dataclass(frozen=True)
class Snapshot:
    """A model in the hub's cache; `absent` names what it should hold and does not."""

    path: Path
    absent: tuple[str, ...]

    @property
    def has_tokenizer(self) -> bool:
        return any((self.path / name).is_file() for name in TOKENIZERS)


def hub_cache() -> Path:
    """Return the hub's cache folder as the environment names it at this moment."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(home, "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(os.path.expandvars(cache or os.path.join(home, "hub"))).expanduser()


def find_cached(hub_id: str, revision: str | None) -> Snapshot | None:
    """Look ``hub_id`` up in the cache: refs/<revision> holds the commit, snapshots/<commit> it."""
    repository = hub_cache() / f"models--{hub_id.replace('/', '--')}"
    reference = repository / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision
    if not commit or not (repository / "snapshots" / commit).is_dir():
        return None
    return _read_snapshot(repository / "snapshots" / commit)


def find_local(hub_id: str) -> Path | None:
    """Return the folder of a model that lies complete in the cache."""
    snapshot = find_cached(hub_id, None)
    return snapshot.path if snapshot and not snapshot.absent else None


def _read_snapshot(folder: Path) -> Snapshot:
    index = folder / "model.safetensors.index.json"
    mapping = read_json_or_nothing(index).get("weight_map") if index.is_file() else None
    weights = {str(name) for name in mapping.values()} if isinstance(mapping, dict) else set()
    names = ["config.json", *sorted(weights or {"model.safetensors"})]
    absent = [name for name in names if not (folder / name).is_file()]
    return Snapshot(folder, tuple(absent))


def download(hub_id: str, revision: str | None, allow_network: bool) -> Snapshot:
    """Fetch what `WANTED` matches into the hub's cache; every refusal becomes a UserError.

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
        info = HfApi(endpoint=endpoint).model_info(
            hub_id, revision=revision, timeout=ANSWER_SECONDS
        )
        _require_safetensors(hub_id, [file.rfilename for file in info.siblings or []])
        folder = snapshot_download(
            hub_id, revision=revision, cache_dir=hub_cache(), endpoint=endpoint,
            etag_timeout=ANSWER_SECONDS, allow_patterns=WANTED, ignore_patterns=UNWANTED,
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
        hint = hint or suggest_sibling(Path(hub_id))
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
    snapshot = _read_snapshot(Path(folder))
    if snapshot.absent:
        raise UserError(f"{name} is not whole on the hub: it lacks {name_some(snapshot.absent)}")
    return snapshot


def _require_safetensors(hub_id: str, names: list[str]) -> None:
    if any(WEIGHTS.fullmatch(name) for name in names):
        return
    if any(name.endswith(PICKLES) for name in names):
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
    patterns = " ".join(f"'{pattern}'" for pattern in WANTED)
    beside = suggest_sibling(Path(hub_id))
    return UserError(
        f"{hub_id} cannot be fetched: the hub is out of reach ({_first_line(why)})",
        fix=f"Where there is a network, run `hf download {hub_id} --local-dir {name} "
        f"--include {patterns}`, and name that folder.{beside}",
    )


def _offline() -> bool:
    setting = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return setting.upper() in {"1", "ON", "YES", "TRUE"}


def _first_line(message: str) -> str:
    return (message.strip() or "no answer").splitlines()[0]


def read_json_or_nothing(path: Path) -> dict[str, Any]:
    """Return the object in ``path``, empty when it is not JSON: such a file counts as absent."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}

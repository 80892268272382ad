"""difftool.json: the chain of steps that made a checkpoint, and how each was verified."""

import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from difftool import __version__
from difftool.errors import UserError

PROVENANCE = "difftool.json"
SCHEMA = 1


class SourceRecord(BaseModel):
    """What a step started from: a name without local paths, a hub commit, a fingerprint."""

    model_config = ConfigDict(frozen=True)

    id: str
    revision: str | None = None
    fingerprint: str


class Step(BaseModel):
    """One stage's work. `metrics` holds its figures, for convert those of the verification."""

    model_config = ConfigDict(frozen=True)

    stage: str
    options: dict[str, Any]
    source: SourceRecord
    output_fingerprint: str
    versions: dict[str, str]
    seconds: float
    metrics: dict[str, Any] = Field(default_factory=dict)

    @field_validator("metrics")
    @classmethod
    def _check_verification(cls, metrics: dict[str, Any]) -> dict[str, Any]:
        proofs = metrics.get("verification") or []
        if not isinstance(proofs, list) or not all(
            isinstance(proof, dict) and proof.keys() >= {"dtype", "verdict"} for proof in proofs
        ):
            raise ValueError("verification is no list of figures with a dtype and a verdict")
        return metrics


class Provenance(BaseModel):
    """The whole file: steps from the first source to this checkpoint."""

    model_config = ConfigDict(frozen=True)

    schema_version: int = SCHEMA
    steps: tuple[Step, ...] = ()


def read_provenance(folder: Path) -> Provenance:
    """Return the folder's chain of steps, empty where there is none.

    Raises:
        UserError: the file is there and is not what difftool writes.
    """
    path = folder / PROVENANCE
    if not path.exists():
        return Provenance()
    try:
        provenance = Provenance.model_validate_json(path.read_text(encoding="utf-8"))
    except (ValidationError, UnicodeDecodeError) as error:
        first = str(error).splitlines()[0]
        raise UserError(
            f"{path} cannot be read as a chain of steps: {first}",
            f"the file that difftool writes, schema version {SCHEMA}",
            "Restore it, or remove it to treat the folder as a plain source",
        ) from error
    if provenance.schema_version != SCHEMA:
        raise UserError(
            f"{path} has schema version {provenance.schema_version}",
            f"version {SCHEMA}, which this difftool writes",
            "Use the difftool that wrote it",
        )
    return provenance


def write_provenance(folder: Path, provenance: Provenance) -> None:
    """Write difftool.json into a folder."""
    text = json.dumps(provenance.model_dump(mode="json"), indent=2, ensure_ascii=False)
    (folder / PROVENANCE).write_text(text + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """Return the versions that decide a result: difftool, Python, torch, transformers."""
    return {
        "difftool": __version__,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "transformers", "safetensors")},
    }

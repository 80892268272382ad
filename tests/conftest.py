"""What every test may ask for: real data and checkpoints, and no network."""

import os
import tempfile
from importlib.resources import as_file, files
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Read when huggingface_hub, transformers and torch are imported, so set before any of them is.
_remote_code = tempfile.TemporaryDirectory(prefix="difftool-remote-code-")
os.environ["HF_MODULES_CACHE"] = _remote_code.name  # copies of checkpoints' code: not in the home
os.environ["HF_HUB_OFFLINE"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # workers that share the cores are faster so


def pytest_unconfigure() -> None:
    _remote_code.cleanup()


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the test, and the processes it starts, off the network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, offline: None) -> None:
    """Undo `offline`, for a test that serves a hub of its own on this machine."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The embedded checkpoint."""
    with as_file(files("difftool") / "assets" / "tiny") as folder:
        return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Texts, configs and a small checkpoint that are not to lie in the repository."""
    return _existing(ROOT.parent / "shared" / "data", "DIFFTOOL_TEST_DATA", "that folder")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, as scripts/fetch_smollm2.py leaves it."""
    file = ROOT / ".cache" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    return _existing(file, "DIFFTOOL_SMOLLM2_GGUF", "that file, or run scripts/fetch_smollm2.py")


def _existing(default: Path, variable: str, wanted: str) -> Path:
    path = Path(os.environ.get(variable) or default)
    if not path.exists():
        pytest.skip(f"{path} is not there; set {variable} to {wanted}")
    return path

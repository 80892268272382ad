"""A GGUF file -> a checkpoint folder, dequantised by transformers."""

import json
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from difftool.errors import UserError, did_you_mean, name_some
from difftool.hub import read_json_or_nothing

GGUF_DTYPES = ("bfloat16", "float16", "float32")
UNREADABLE = (
    struct.error,
    ValueError,
    IndexError,
    KeyError,
    OverflowError,
    RuntimeError,
    OSError,
)


@contextmanager
def converted_gguf(file: Path, dtype: str) -> Iterator[Path]:
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
    except UNREADABLE as error:
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
            f"{file.name} is not one whole model: {name_some(wrong)} missing or left over",
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
        values = read_json_or_nothing(folder / name)
        kept = {key: value for key, value in values.items() if key not in keys}
        (folder / name).write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n")
    mode = (folder / "config.json").stat().st_mode
    for weights in folder.glob("*.safetensors"):
        weights.chmod(mode)

"""Load converted checkpoints with plain transformers in a process that cannot import difftool.

Run as `python -I run_without_difftool.py`. Each line of its input is a job in JSON: `source`, a
plain checkpoint; `converted`, the one made of it; `resaved`, a folder to be made; `auto`, the Auto
class. Each line of its output is the answer: what loading found, how far the two models are apart.
"""

import json
import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any


class NoDifftool(MetaPathFinder):
    """Stands before all other finders, so that no .pth file or editable install gets past it."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] == "difftool":
            raise ModuleNotFoundError(f"{name} is not to be had here")


sys.meta_path.insert(0, NoDifftool())
# What is printed, or asked for, while models are loaded must not meet the jobs and the answers.
jobs, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(2, 1)

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors import safe_open  # noqa: E402

RUNS = (  # dtype, attention kernel (None: the model's own), whether to decode as well
    ("float32", None, True),
    ("float32", "eager", True),
    ("bfloat16", None, False),
)


def load(auto: str, folder: str, **options: Any) -> tuple[Any, list[str]]:
    """Return the model in evaluation mode, and the names of weights that did not find their place.

    The weights are moved to memory that torch aligned itself: in a mapped file they lie anywhere,
    and a matrix-vector product may round its last bit differently by where its operand starts.
    """
    model, found = getattr(transformers, auto).from_pretrained(
        folder, output_loading_info=True, local_files_only=True, **options
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.eval(), sorted(str(name) for names in found.values() for name in names)


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and mask [2, 20]; the first row is padded on the left."""
    ids = torch.randint(3, 100, (2, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[0, :5] = mask[0, :5] = 0
    return ids, mask


@torch.no_grad()
def observe(model: Any, decode: bool = False) -> dict[str, torch.Tensor]:
    """Return what a model says of the batch in one pass and, on request, while it generates."""
    ids, mask = make_batch()
    output = model(ids, attention_mask=mask)
    if "logits" not in output:
        return {"pass": output.last_hidden_state[mask.bool()].float()}
    if not model.can_generate():
        return {"pass": output.logits.float()}
    if not decode:
        return {"pass": output.logits[mask.bool()].float()}
    generated = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=5,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return {
        "pass": output.logits[mask.bool()].float(),
        "decoding": torch.stack(generated.logits).float(),
        "tokens": generated.sequences,
    }


def difference(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return by observation the largest difference, relative to the largest value."""
    return {
        name: float((value - two[name]).abs().max() / value.abs().max())
        if value.shape == two[name].shape
        else float("inf")
        for name, value in one.items()
    }


def refusal(auto: str, folder: str) -> str:
    """Return with what words a load without trust_remote_code fails; empty if it does not."""
    try:
        getattr(transformers, auto).from_pretrained(folder, local_files_only=True)
    except ValueError as error:
        return str(error)
    return ""


def stored(folder: str) -> dict[str, bytes]:
    """Return every tensor of a checkpoint as dtype, shape and bytes."""
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118, it is no dict
                tensor = file.get_tensor(name)
                data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
                found[name] = f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + data
    return found


def compare(auto: str, source: str, converted: str) -> tuple[dict[str, float], list[str]]:
    """Return the differences by dtype, kernel and observation, and what loading complained of."""
    differences, complaints = {}, []
    for dtype, kernel, decode in RUNS:
        options = {"dtype": dtype} | ({"attn_implementation": kernel} if kernel else {})
        before, _ = load(auto, source, **options)
        after, unplaced = load(auto, converted, trust_remote_code=True, **options)
        complaints += unplaced
        for name, value in difference(observe(before, decode), observe(after, decode)).items():
            differences[f"{dtype} {kernel or 'own'} {name}"] = value
    return differences, complaints


def resave(auto: str, converted: str, resaved: str) -> dict[str, Any]:
    """Save the loaded model, load that, and compare."""
    first, _ = load(auto, converted, dtype="auto", trust_remote_code=True)
    first.save_pretrained(resaved)
    second, unplaced = load(auto, resaved, dtype="auto", trust_remote_code=True)
    before, after = stored(converted), stored(resaved)
    return {
        "resaved_class": type(second).__name__,
        "resaved_unplaced": unplaced,
        "resaved_differences": difference(observe(first), observe(second)),
        "resaved_tensors": sorted(
            name for name in before | after if before.get(name) != after.get(name)
        ),
    }


def examine(source: str, converted: str, resaved: str, auto: str) -> dict[str, Any]:
    """Do one job."""
    refused = refusal(auto, converted)
    config = transformers.AutoConfig.from_pretrained(converted, trust_remote_code=True)
    differences, unplaced = compare(auto, source, converted)
    body, _ = load("AutoModel", source, dtype="float32")
    grafted, _ = load("AutoModel", converted, dtype="float32", trust_remote_code=True)
    return {
        "refusal": refused,
        "config_class": type(config).__name__,
        "model_type": config.model_type,
        "body_class": type(grafted).__name__,
        "unplaced": unplaced,
        "differences": differences,
        "body_differences": difference(observe(body), observe(grafted)),
        **resave(auto, converted, resaved),
        "difftool_modules": [name for name in sys.modules if name.startswith("difftool")],
    }


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for line in jobs:
        print(json.dumps(examine(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()

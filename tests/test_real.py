"""The whole path on real checkpoints: stories260K and SmolLM2-135M-Instruct."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from difftool.bench.options import BenchOptions
from difftool.bench.run import bench
from difftool.bench.summary import summary_rows
from difftool.generation import GenerateOptions, generate
from difftool.sources import open_source
from difftool.surgery.convert import Converted, ConvertOptions, convert
from difftool.surgery.loading import load_tokenizer, loaded_model
from difftool.surgery.verify import PACKED

pytestmark = pytest.mark.real

WINDOW, WINDOWS = 256, 4  # tokens of wikitext-2 that the perplexity is taken over


@pytest.fixture(scope="module")
def stories(shared_data: Path) -> Path:
    return shared_data / "stories260K" / "hf"


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Iterator[Path]:
    with open_source(str(smollm2_gguf)) as source:
        yield source.path


@pytest.fixture(scope="module", params=["diffv2", "attnres"])
def converted(
    request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Converted:
    out = tmp_path_factory.mktemp("smollm2") / f"smollm2-{request.param}"
    return convert(str(smollm2), out, ConvertOptions(to=request.param))


def write_text(folder: Path, prompt: str, tokens: int) -> str:
    pieces: list[str] = []
    generate(str(folder), prompt, GenerateOptions(max_new_tokens=tokens), pieces.append)
    return "".join(pieces)


@torch.no_grad()
def perplexity(model: PreTrainedModel, tokens: torch.Tensor) -> float:
    """Perplexity over windows [N, T], every token but a window's first predicted once."""
    logits = model(tokens).logits[:, :-1].float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return math.exp(loss.item())


@pytest.mark.parametrize("target", ["diffv2", "attnres"])
def test_stories260k_tells_the_same_story_after_conversion(
    stories: Path, target: str, tmp_path: Path
) -> None:
    result = convert(str(stories), tmp_path / "out", ConvertOptions(to=target))
    assert all(v == 0 for k, v in result.comparisons[0].differences.items() if k != PACKED)
    told = []
    for folder in (stories, result.path):
        with loaded_model(folder, torch.float32) as model:
            begin = torch.tensor([[1, 403, 407, 261, 378]])  # <s> Once upon a time
            told.append(model.generate(begin, max_new_tokens=120, do_sample=False).tolist())
    assert told[0] == told[1]
    assert len(set(told[0][0])) > 30, "a story, not a loop"


def test_smollm2_is_bit_identical_in_both_dtypes(converted: Converted) -> None:
    assert {comparison.dtype for comparison in converted.comparisons} == {"bfloat16", "float32"}
    for comparison in converted.comparisons:
        apart = {k: v for k, v in comparison.differences.items() if k != PACKED}
        assert not any(apart.values()), comparison
        assert comparison.greedy_equal


def test_smollm2_knows_the_capital_of_france_before_and_after(
    smollm2: Path, converted: Converted
) -> None:
    prompt = "The capital of France is"
    before, after = (write_text(folder, prompt, 8) for folder in (smollm2, converted.path))
    assert before == after
    assert after.startswith(f"{prompt} Paris.")


def test_smollm2_has_equal_perplexity_on_wikitext(
    smollm2: Path, converted: Converted, shared_data: Path
) -> None:
    text = (shared_data / "wikitext-2" / "test.txt").read_text(encoding="utf-8")[:20_000]
    tokenizer = load_tokenizer(smollm2)
    assert tokenizer is not None
    tokens = torch.tensor(tokenizer(text)["input_ids"])[: WINDOW * WINDOWS].view(WINDOWS, WINDOW)
    figures = []
    for folder in (smollm2, converted.path):
        with loaded_model(folder, torch.float32) as model:
            figures.append(perplexity(model, tokens))
    assert figures[0] == figures[1]
    assert 15 < figures[0] < 60, "a language model that has seen English"


def test_smollm2_is_benched_beside_its_conversion_at_a_ratio_of_one(
    smollm2: Path, converted: Converted, shared_data: Path, tmp_path: Path
) -> None:
    options = BenchOptions(
        measures=("perplexity",),
        text=shared_data / "wikitext-2" / "test.txt",
        limit=WINDOWS,
        seq_len=WINDOW,
        dtype="float32",
    )
    report = bench([str(smollm2), str(converted.path)], options, tmp_path / "report")
    assert report.complete
    before, after = report.results("perplexity").values()
    assert before == after
    _, rows = summary_rows(report)
    assert "1.0000" in rows[0][2], rows


def test_smollm2_composes_into_a_model_with_both(converted: Converted, tmp_path: Path) -> None:
    (other,) = {"diffv2", "attnres"} - set(converted.plan.targets)
    both = convert(str(converted.path), tmp_path / "both", ConvertOptions(to=other))
    assert both.plan.targets == ("diffv2", "attnres")
    for comparison in both.comparisons:
        assert comparison.greedy_equal
        assert not any(v for k, v in comparison.differences.items() if k != PACKED)

"""Perplexity against slow references: one token at a time, and transformers' own loss."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from command_line import edit_json, write_tokenizer
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from difftool.bench.measures.perplexity import (
    Result,
    clustered_stderr,
    headline,
    measure,
    token_nats,
)
from difftool.bench.options import BenchOptions, parse_options
from difftool.bench.subject import Subject, open_subject
from difftool.bench.text import cut_windows, encode, read_text, whole_windows
from difftool.errors import UserError

TEXT = "".join(f"def f{i}(x):\n    return x + {i * i}\n\n" for i in range(40))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.py"
    file.write_text(TEXT)
    return file


def perplexity(source: str | Path, text: Path | None, **settings: object) -> Result:
    options = parse_options(**{"text": text, "dtype": "float32", "seq_len": 64, **settings})
    with open_subject("model", str(source), options) as subject:
        return measure(subject, options, lambda what, done, total: None)


def one_by_one(subject: Subject, start: list[int], ids: list[int], seq_len: int, stride: int):
    """Nats of each scored token, from a forward pass of its own over exactly its context."""
    nats, done, begin = [], 0 if start else 1, 0
    while done < len(ids):
        end = min(begin + seq_len - len(start), len(ids))
        for place in range(done, end):
            context = torch.tensor([[*start, *ids[begin:place]]])
            logits = subject.model.logits(context)[0, -1].double()
            nats.append(-float(logits.log_softmax(-1)[ids[place]]))
        done, begin = end, begin + stride
    return nats


@pytest.mark.parametrize("stride", [17, 32, 63])
def test_every_token_is_scored_once_with_its_window_as_context(text: Path, stride: int) -> None:
    options = BenchOptions(dtype="float32")
    with open_subject("tiny", "tiny", options) as subject:
        start, ids = encode(TEXT[:600], subject.require_tokenizer())
        nats = one_by_one(subject, start, ids, 64, stride)
    text.write_text(TEXT[:600])
    result = perplexity("tiny", text, stride=stride)
    assert result.tokens == len(nats) == len(ids)
    assert result.bytes == 600
    # float32 logits of one token or of many differ by rounding
    assert result.nats_per_token == pytest.approx(sum(nats) / len(nats), abs=1e-5)
    assert result.perplexity == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-4)
    assert result.bits_per_byte == pytest.approx(sum(nats) / math.log(2) / 600, rel=1e-5)


def test_agrees_with_the_strided_loss_that_transformers_computes(text: Path) -> None:
    """The loop of transformers' guide: labels of -100 where a token was scored before."""
    with open_subject("tiny", "tiny", BenchOptions(dtype="float32")) as subject:
        start, ids = encode(TEXT, subject.require_tokenizer())
        sums, count, done = 0.0, 0, 0
        for begin in range(0, len(ids), 20):
            end = min(begin + 63, len(ids))
            tokens = torch.tensor([[*start, *ids[begin:end]]])
            labels = tokens.clone()
            labels[:, : len(tokens[0]) - (end - done)] = -100
            with torch.no_grad():
                loss = subject.module(tokens, labels=labels).loss
            sums, count, done = sums + float(loss) * (end - done), count + end - done, end
            if end == len(ids):
                break
    result = perplexity("tiny", text, stride=20)
    assert result.tokens == count
    assert result.perplexity == pytest.approx(math.exp(sums / count), rel=1e-4)


def test_batch_size_changes_nothing_beyond_rounding_and_a_second_run_nothing(text: Path) -> None:
    one, again, many = (perplexity("tiny", text, batch_size=size) for size in (1, 1, 7))
    assert one == again
    assert many.nats_per_token == pytest.approx(one.nats_per_token, rel=1e-6)
    assert many.tokens == one.tokens


def test_a_limit_scores_the_first_windows_and_counts_their_bytes_only(text: Path) -> None:
    with open_subject("tiny", "tiny", BenchOptions()) as subject:
        tokenizer = subject.require_tokenizer()
        start, ids = encode(TEXT, tokenizer)
        begun = tokenizer.decode(ids[: 63 + 32])
    result = perplexity("tiny", text, stride=32, limit=2)
    assert (result.windows, result.tokens) == (2, 63 + 32)
    assert result.bytes == len(begun.encode())
    assert start == [tokenizer.bos_token_id]


def test_a_text_shorter_than_a_window_is_one_window(text: Path) -> None:
    text.write_text("x = 1")
    result = perplexity("tiny", text)
    assert result.windows == 1
    assert math.isnan(result.nats_stderr)  # one window tells nothing of the spread
    assert math.isfinite(headline(result)[0].value)


@pytest.mark.parametrize("content", ["", "  \n"])
def test_an_empty_text_is_refused(text: Path, content: str) -> None:
    text.write_text(content)
    with pytest.raises(UserError, match="is empty"):
        perplexity("tiny", text)


def test_a_text_that_is_not_utf8_is_refused(text: Path) -> None:
    text.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read"):
        perplexity("tiny", text)


def test_a_tokenizer_without_bos_and_pad_leaves_the_first_token_out(
    tmp_path: Path, tiny: Path, text: Path
) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "bare"))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(content))
    edit_json(folder / "tokenizer_config.json", bos_token=None, pad_token=None)
    with open_subject("bare", str(folder), BenchOptions(dtype="float32")) as subject:
        start, ids = encode(TEXT, subject.require_tokenizer())
        assert start == []
        nats = one_by_one(subject, start, ids[:100], 64, 32)
    text.write_text(subject.require_tokenizer().decode(ids[:100]))
    result = perplexity(folder, text, stride=32)
    assert result.tokens == 99
    assert result.nats_per_token == pytest.approx(sum(nats) / 99, abs=1e-5)


def test_nan_weights_give_nan_and_no_average(tmp_path: Path, tiny: Path, text: Path) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "broken"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert math.isnan(perplexity(folder, text).perplexity)


def test_a_vocabulary_of_262_thousand_is_scored_in_parts(tmp_path: Path, text: Path) -> None:
    folder = tmp_path / "wide"
    config = LlamaConfig(
        vocab_size=262_144, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder, 262_144)
    text.write_text(" ".join(f"w{3 + 2017 * i % 262_000}" for i in range(200)))
    result = perplexity(folder, text, seq_len=128, limit=1)
    assert result.nats_per_token == pytest.approx(math.log(262_144), rel=0.01)


def test_token_nats_in_parts_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 11, generator=generator) * 20
    targets = torch.randint(11, (50,), generator=generator)
    expected = [
        float(row.logsumexp(-1) - row[t]) for row, t in zip(logits.double(), targets, strict=True)
    ]
    monkeypatch.setattr("difftool.bench.measures.perplexity.CHUNK", 33)
    torch.testing.assert_close(
        token_nats(logits, targets).double(), torch.tensor(expected).double(), rtol=1e-5, atol=1e-5
    )


def test_the_standard_error_is_the_spread_of_repeated_samples() -> None:
    """Draw clusters again and again; the estimate must be near what the means really do."""
    generator = torch.Generator().manual_seed(0)
    means, estimates = [], []
    for _ in range(400):
        counts = torch.randint(20, 60, (30,), generator=generator)
        level = torch.randn(30, generator=generator)  # what the items of a cluster share
        noise = torch.randn(30, generator=generator) * counts.sqrt()
        clusters = [
            (float(c * a + e), int(c)) for c, a, e in zip(counts, level, noise, strict=True)
        ]
        means.append(sum(s for s, _ in clusters) / sum(c for _, c in clusters))
        estimates.append(clustered_stderr(clusters))
    true = float(torch.tensor(means).std())
    assert sum(estimates) / len(estimates) == pytest.approx(true, rel=0.1)


def test_windows_of_a_text_cover_it_without_overlap_in_what_they_score() -> None:
    ids = list(range(100))
    for start in ([], [7, 8]):
        for seq_len in (5, 9, 102, 200):
            for stride in range(1, seq_len - len(start) + 1):
                windows = list(cut_windows(start, ids, seq_len, stride))
                scored = [int(t) for w in windows for t in w.tokens[len(w.tokens) - w.scored :]]
                assert scored == ids[0 if start else 1 :]
                assert all(w.tokens[: len(start)].tolist() == start for w in windows)
                assert all(len(w.tokens) <= seq_len for w in windows)


def test_whole_windows_refuse_a_text_that_fills_none() -> None:
    assert whole_windows([9], list(range(10)), 4).tolist() == [
        [9, 0, 1, 2],
        [9, 3, 4, 5],
        [9, 6, 7, 8],
    ]
    with pytest.raises(UserError, match="less than one window of 16"):
        whole_windows([9], list(range(10)), 16)


def test_a_stride_beyond_the_window_is_refused() -> None:
    with pytest.raises(UserError, match="tokens would be skipped"):
        parse_options(seq_len=64, stride=65)


def test_the_built_in_text_is_there() -> None:
    assert len(read_text(None)) > 100_000

"""Retrieval: the prompts, their scores by hand, models that know and that guess, and attention."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_subject import LetterTokenizer, silent, subject_of
from reference.retrieval import attention_by_part, sequence_log_likelihood
from tiny_models import VOCABULARY, graft, make_model, randomise

from difftool.bench.charts import draw_charts
from difftool.bench.measures import retrieval
from difftool.bench.needle_attention import last_query_attention
from difftool.bench.needle_scoring import distinct_rows, log_likelihoods
from difftool.bench.needles import (
    CITIES,
    DEPTHS,
    NUMBERS,
    SETTINGS,
    Haystack,
    Needle,
    compose,
)
from difftool.bench.options import BenchOptions
from difftool.bench.subject import Subject, TorchModel, open_subject
from difftool.errors import UserError
from difftool.sources import open_source

TEXT = "".join(f"Line {i} of a text about ships. It is dull, and it goes on.\n" for i in range(90))
LENGTH = 640  # letters; a haystack with six needles and a question has room
BOS = 1


class TwoTokens(LetterTokenizer):
    """Every letter is two tokens: 0 to 7 and 8 in eighths of its code."""

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        pairs = [[3 + ord(letter) // 8, 40 + ord(letter) % 8] for letter in text]
        ids = [token for pair in pairs for token in pair]
        return {"input_ids": self.start + ids if add_special_tokens else ids}


class PairsOfLetters(LetterTokenizer):
    """Two letters are a token, and so is the last one of an odd number."""

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        return {"input_ids": [text[place : place + 2] for place in range(0, len(text), 2)]}


class NoDigits(LetterTokenizer):
    """All digits are one token."""

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        return super().__call__(re.sub(r"\d", "0", text), add_special_tokens)


Rule = Callable[[str, dict[str, str]], str]  # city, numbers by city in the text -> a digit


class Known:
    """A model that answers by a rule and is sure of it by 9 nats."""

    vocab_size = VOCABULARY

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def logits(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        logits = torch.zeros(*tokens.shape, VOCABULARY)
        for row, ids in enumerate(tokens.tolist()):
            text = "".join(chr(max(token - 3, 0)) for token in ids)
            hidden = dict(re.findall(r"number of (\w+) is (\d)", text.split("Question")[0]))
            for match in re.finditer(r"number of (\w+) is ", text):
                digit = self.rule(match[1], hidden)
                logits[row, match.end() - 1, 3 + ord(digit)] = 9.0
        return logits


def another(city: str, hidden: dict[str, str]) -> str:
    """Name the number of another city, or a digit that is nowhere if there is none."""
    unused = min(set(NUMBERS) - {*hidden.values()})
    return min({*hidden.values()} - {hidden[city]}, default=unused)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "ships.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def haystack_of(tokenizer: Any, *start: int, text: str = TEXT) -> Haystack:
    return Haystack(text, tokenizer, list(start))


def random_subject() -> Subject:
    return subject_of(make_model("llama", max_position_embeddings=2048, num_hidden_layers=1), BOS)


def run(subject: Subject, text: Path, **options: Any) -> retrieval.Result:
    chosen = {"limit": 1, "seq_len": LENGTH, "text": text, **options}
    return retrieval.measure(subject, BenchOptions(measures=(), **chosen), silent)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("place", range(len(DEPTHS)))
def test_a_prompt_holds_every_needle_once_and_asks_for_some(
    setting: tuple[int, int], place: int
) -> None:
    needles, asked = setting
    prompt = haystack_of(LetterTokenizer()).prompt(setting, place, LENGTH, "seed")
    assert len(prompt.needles) == needles and prompt.asked == asked
    assert len({needle.city for needle in prompt.needles}) == needles
    assert len({needle.number for needle in prompt.needles}) == needles
    for needle, (begin, end) in zip(prompt.needles, prompt.spans, strict=True):
        assert prompt.context[begin:end] == needle.sentence
        assert prompt.context.count(needle.sentence) == 1
        assert re.match(r"(^|\s)$", prompt.context[begin - 1 : begin])
        assert prompt.context[end].isspace()
    without = prompt.context
    for needle in prompt.needles:
        without = re.sub(rf"{re.escape(needle.sentence)}\s", "", without)
    assert without and without in TEXT + TEXT, "what remains is a stretch of the text"
    for index, needle in enumerate(prompt.needles[:asked]):
        assert needle.depth == DEPTHS[(place + 2 * index) % 5]
        begin = prompt.spans[index][0]
        inside = sum(
            len(n.sentence) + 1
            for n, s in zip(prompt.needles, prompt.spans, strict=True)
            if s[0] < begin
        )
        # between the two pieces of text, of 43 letters at most, nearest after the depth
        assert 0 <= begin - inside - needle.depth * len(without) <= 43
    cities = [needle.city for needle in prompt.needles[:asked]]
    tail = prompt.before_answer(asked - 1).removeprefix(prompt.context)
    if asked == 1:
        assert tail == (
            f"\n\nQuestion: What is the magic number of {cities[0]}?\n"
            f"Answer: The magic number of {cities[0]} is"
        )
    else:
        assert tail == (
            f"\n\nQuestion: What are the magic numbers of {cities[0]} and {cities[1]}?\n"
            f"Answer: {prompt.needles[0].sentence} The magic number of {cities[1]} is"
        )


def test_a_prompt_fills_its_length_and_depends_on_its_seed_alone() -> None:
    haystack = haystack_of(LetterTokenizer(), BOS)
    longest = max(map(len, haystack.pieces))
    for length in (haystack.shortest(), 500, 700, 4 * len(TEXT)):  # the text begins again
        for setting in SETTINGS:
            prompt = haystack.prompt(setting, 2, length, "one")
            question = haystack.question(prompt, prompt.asked - 1)
            assert length - longest <= len(question.shared) + 1 <= length
    assert haystack.prompt((4, 2), 1, 500, "one") == haystack.prompt((4, 2), 1, 500, "one")
    assert haystack.prompt((4, 2), 1, 500, "one") != haystack.prompt((4, 2), 1, 500, "two")


def test_text_without_lines_or_sentences_is_cut_too() -> None:
    for text in ("x" * 1000, "word " * 300, "\n\n\n", "a. b! c?\nd"):
        haystack = haystack_of(LetterTokenizer(), text=text)
        assert "".join(haystack.pieces) == text
        assert max(map(len, haystack.pieces)) <= 202
        assert haystack.prompt((2, 2), 1, 500, "seed").context


def test_numbers_are_spread_evenly_over_digits_and_depths() -> None:
    haystack = haystack_of(LetterTokenizer())
    prompts = [
        haystack.prompt((2, 2), place, 300, f"{place} {i}") for place in range(5) for i in range(60)
    ]
    numbers = Counter(prompt.needles[0].number for prompt in prompts)
    assert set(numbers) == set(range(10)) and min(numbers.values()) > 10  # 30 are expected
    assert len({prompt.needles[0].city for prompt in prompts}) == len(CITIES)
    for index in (0, 1):
        depths = Counter(prompt.needles[index].depth for prompt in prompts)
        assert depths == dict.fromkeys(DEPTHS, 60)


@pytest.mark.parametrize("tokenizer", [LetterTokenizer(BOS), TwoTokens(BOS), TwoTokens()])
def test_likelihoods_are_those_of_whole_sequences(tokenizer: LetterTokenizer) -> None:
    """A candidate's lead over another is the same with all that comes before it counted in."""
    model = make_model("llama", max_position_embeddings=2048, num_hidden_layers=1)
    exact = make_model("llama", max_position_embeddings=2048, num_hidden_layers=1).double()
    haystack = haystack_of(tokenizer, *tokenizer.start)
    prompt = compose(["It is dull. "], (Needle("Rome", 7, 0.0), Needle("Oslo", 2, 1.0)), 2)
    questions = [haystack.question(prompt, index) for index in range(2)]
    assert [len(question.tails[0]) for question in questions] == (
        [2, 2] if isinstance(tokenizer, TwoTokens) else [1, 1]
    )
    for size in (1, 3):
        found = log_likelihoods(TorchModel(model), questions, size)
        for index, question in enumerate(questions):
            assert NUMBERS[question.right] == "72"[index]
            assert question.others == {2 if index == 0 else 7}
            whole = [
                sequence_log_likelihood(
                    exact, tokenizer(f"{prompt.before_answer(index)} {number}")["input_ids"]
                )
                for number in NUMBERS
            ]
            leads = [value - found[index][0] for value in found[index]]
            assert leads == pytest.approx([v - whole[0] for v in whole], abs=1e-4)  # float32
            if len(question.tails[0]) == 1:
                logits = exact(torch.tensor([question.shared])).logits[0, -1]
                digits = logits.log_softmax(-1)[[tail[0] for tail in question.tails]]
                assert found[index] == pytest.approx(digits.tolist(), abs=1e-4)


def test_rows_that_another_row_begins_with_are_not_run() -> None:
    rows = distinct_rows([[1, 2], [1], [1, 2, 3], [2], [1, 2, 3], [1, 3]])
    assert sorted(rows) == [[1, 2, 3], [1, 3], [2]]


def test_a_model_that_knows_gets_all_right_and_one_that_guesses_one_in_ten(text: Path) -> None:
    subject = random_subject()
    knows = run(replace(subject, model=Known(lambda city, hidden: hidden[city])), text)
    guesses = run(replace(subject, model=Known(lambda city, hidden: "|")), text)
    for score in (knows.overall, *knows.settings, *knows.cells):
        assert (score.accuracy, score.confused) == (1.0, 0.0)
        assert score.margin == pytest.approx(9.0, abs=1e-5)
    for score in (guesses.overall, *guesses.settings, *guesses.cells):
        assert score.accuracy == pytest.approx(guesses.chance) == pytest.approx(0.1)
        assert score.margin == 0.0
    assert not knows.attention and "does not run in torch" in knows.no_attention
    assert [figure.name for figure in retrieval.headline(knows)] == [
        "retrieval accuracy",
        "retrieval margin, nats",
    ]


def test_a_model_that_mixes_needles_up_is_told_from_one_that_finds_none(text: Path) -> None:
    subject = random_subject()
    mixes = run(replace(subject, model=Known(another)), text)
    assert mixes.overall.accuracy == 0.0
    for score in mixes.settings:
        assert score.confused == (0.0 if score.needles == 1 else 1.0)
        assert score.margin == pytest.approx(-9.0, abs=1e-5)


def test_cells_add_up_and_errors_are_those_of_prompts(text: Path) -> None:
    def rule(city: str, hidden: dict[str, str]) -> str:
        return hidden[city] if city < "L" else another(city, hidden)

    result = run(replace(random_subject(), model=Known(rule)), text, limit=3, seq_len=800)
    assert result.lengths == (400, 800)
    assert [(score.needles, score.asked) for score in result.settings] == list(SETTINGS)
    assert [score.questions for score in result.settings] == [30, 60, 60, 60]
    assert result.overall.prompts == 120 and len(result.cells) == 4 * 2 * 5
    for score in result.settings:
        cells = [c for c in result.cells if c.needles == score.needles]
        assert {(c.length, c.depth) for c in cells} == {(n, d) for n in (400, 800) for d in DEPTHS}
        hits = math.fsum(cell.accuracy * cell.questions for cell in cells)
        assert score.accuracy == pytest.approx(hits / score.questions)
        assert {cell.questions for cell in cells} == {3 * score.asked}
    one = result.settings[0]  # a question a prompt: the usual standard error
    spread = one.accuracy * (1 - one.accuracy) / (one.questions - 1)
    assert one.accuracy_stderr == pytest.approx(math.sqrt(spread))


def test_the_same_seed_gives_the_same_bits_and_batches_change_only_rounding(text: Path) -> None:
    subject = random_subject()
    first, again = (run(subject, text, batch_size=4) for _ in range(2))
    assert first == again
    single = run(subject, text, batch_size=1)
    for one, other in zip(first.cells, single.cells, strict=True):
        assert one.accuracy == other.accuracy
        assert one.margin == pytest.approx(other.margin, abs=1e-4)  # float32
    assert run(subject, text, seed=1).overall != first.overall


def test_nan_is_not_averaged_away(text: Path) -> None:
    class SometimesNan(Known):
        def logits(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            logits = super().logits(tokens)
            logits[tokens[:, -20:].sum(-1) % 5 == 0] = math.nan
            return logits

    result = run(
        replace(random_subject(), model=SometimesNan(lambda city, hidden: hidden[city])), text
    )
    assert math.isnan(result.overall.accuracy) and math.isnan(result.overall.margin)
    assert any(cell.accuracy == 1.0 for cell in result.cells)
    assert any(math.isnan(cell.accuracy) for cell in result.cells)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "diffv2", "diffv2 gated"])
def test_attention_is_that_of_transformers_own_maps(name: str) -> None:
    pairs = name.startswith("diffv2")
    model = make_model("llama" if pairs else name, max_position_embeddings=2048)
    if pairs:
        model = graft(model, "diffv2", start_gate=0.3 if "gated" in name else None)
        randomise(model, seed=3)
    subject = subject_of(model, BOS)
    haystack = haystack_of(LetterTokenizer(), BOS)
    prompt = haystack.prompt((6, 2), 2, 600, "seed")
    found = retrieval.attention_parts(subject, haystack, prompt)
    begin, end = (place + 1 for place in prompt.spans[0])  # a token a letter, after BOS
    ids = haystack.question(prompt, 0).shared
    expected = attention_by_part(
        model, ids, range(begin, end), 1 + len(prompt.context), pairs=pairs
    )
    assert found == pytest.approx(expected, rel=1e-3)
    assert sum(found.values()) == pytest.approx(1, abs=1e-6)
    assert found["answer"] > 0


def test_attention_of_a_conversion_is_the_source_at_its_start() -> None:
    source = make_model("llama")
    tokens = torch.arange(3, 60)
    before = last_query_attention(source, tokens)
    after = last_query_attention(graft(source, "diffv2"), tokens)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-7)  # float32 sums
    both = last_query_attention(graft(source, "diffv2", "attnres"), tokens)
    torch.testing.assert_close(both, before, rtol=1e-4, atol=1e-6)


def test_attention_tells_a_model_that_looks_at_the_answer(text: Path) -> None:
    result = run(random_subject(), text)
    assert [part.depth for part in result.attention] == list(DEPTHS)
    for part in result.attention:
        assert part.answer + part.noise + part.question + part.first == pytest.approx(1, abs=1e-6)
        assert part.prompts == 1
    names = [figure.name for figure in retrieval.headline(result)]
    assert names[2:] == ["attention to answer", "attention to noise"]


@pytest.mark.parametrize("tokenizer", [LetterTokenizer(), LetterTokenizer(BOS), TwoTokens(BOS)])
def test_spans_are_found_without_offsets(tokenizer: LetterTokenizer) -> None:
    haystack = haystack_of(tokenizer, *tokenizer.start)
    text = "One. The magic number. Two."
    ids = tokenizer(text)["input_ids"]
    begin, end = haystack.token_span(text, ids, (5, 22))
    each = 2 if isinstance(tokenizer, TwoTokens) else 1
    assert (begin, end) == (len(tokenizer.start) + 5 * each, len(tokenizer.start) + 22 * each)


def test_a_token_that_reaches_over_an_end_belongs_to_the_span() -> None:
    haystack = haystack_of(PairsOfLetters())
    text = "One. The magic number. Two."
    ids = PairsOfLetters()(text)["input_ids"]
    for span in ((5, 21), (4, 22)):
        begin, end = haystack.token_span(text, ids, span)
        assert "".join(ids[begin:end]) == " The magic number."


def test_spans_include_tokens_that_reach_over_their_ends(tiny: Path) -> None:
    with open_subject("tiny", "tiny", BenchOptions(measures=(), device="cpu")) as subject:
        tokenizer = subject.require_tokenizer()
    haystack = haystack_of(tokenizer, tokenizer.bos_token_id)
    prompt = haystack.prompt((6, 2), 1, 400, "seed")
    before = prompt.before_answer(0)
    ids = haystack.question(prompt, 0).shared
    for needle, span in zip(prompt.needles, prompt.spans, strict=True):
        begin, end = haystack.token_span(before, ids, span)
        inside = tokenizer.decode(ids[begin:end])
        assert needle.sentence in inside
        assert len(inside) <= len(needle.sentence) + 8, "no more than a token to either side"


def test_lengths_are_bounded_by_the_model_and_left_out_where_nothing_fits(text: Path) -> None:
    shortest = haystack_of(LetterTokenizer(), BOS).shortest()
    subject = subject_of(make_model("llama", max_position_embeddings=shortest + 8), BOS)
    result = run(subject, text, seq_len=4096)
    assert result.lengths == (shortest + 8,)
    assert result.left_out == ((shortest + 8) // 2,)
    (table, *_) = retrieval.tables({"random": result})
    assert f"No room in prompts of {(shortest + 8) // 2} tokens" in table.note
    with pytest.raises(UserError, match=r"no room for 6 needles.*larger --seq-len"):
        run(subject, text, seq_len=shortest - 1)
    learned = subject_of(
        make_model("gpt2", max_position_embeddings=shortest), BOS
    )  # fails past its end
    assert run(learned, text, seq_len=4096).lengths == (shortest,)


def test_a_tokenizer_without_digits_and_none_at_all_are_told(text: Path) -> None:
    with pytest.raises(UserError, match="does not tell the digits apart"):
        run(replace(random_subject(), tokenizer=NoDigits()), text)
    with pytest.raises(UserError, match="has no tokenizer"):
        run(replace(random_subject(), tokenizer=None), text)


def test_the_embedded_model_runs_and_reports(tiny: Path) -> None:
    options = BenchOptions(measures=(), dtype="float32", device="cpu", limit=1, seq_len=256)
    steps: list[tuple[str, int, int]] = []
    with open_subject("tiny", "tiny", options) as subject:
        result = retrieval.measure(subject, options, lambda *step: steps.append(step))
    assert steps[-1][0] == "retrieval" and steps[-1][1] == steps[-1][2] == result.overall.prompts
    assert result.text == "heldout.txt" and result.chance == 0.1
    assert retrieval.Result.model_validate_json(result.model_dump_json()) == result
    needles, depth, attention = retrieval.tables({"a": result, "b": result})
    assert needles.columns[1:5] == ("N=1 R=1#", "N=2 R=2#", "N=4 R=2#", "N=6 R=2#")
    assert "a guess gets 0.10" in needles.note
    for table in (needles, depth, attention):
        assert {len(row) for row in table.rows} == {len(table.columns)}
    assert {row[0] for row in attention.rows} == {"a", "b"}


def test_charts_show_every_setting_and_depth(text: Path) -> None:
    subject = random_subject()
    observed = run(subject, text)
    unseen = run(replace(subject, model=Known(another)), text)
    accuracy, attention = draw_charts("retrieval", {"one": observed, "two": unseen})
    for label in ("1 of 1", "2 of 2", "2 of 4", "2 of 6", "chance", "one", "two"):
        assert label in accuracy.svg
    assert "one" in attention.svg and "two" not in attention.svg
    assert len(draw_charts("retrieval", {"two": unseen})) == 1


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Iterator[Path]:
    with open_source(str(smollm2_gguf)) as source:
        yield source.path


@pytest.mark.real
def test_a_real_model_finds_one_needle_and_mixes_up_several(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "SETTINGS", ((1, 1), (6, 2)))
    options = BenchOptions(measures=(), dtype="float32", device="cpu", limit=1, seq_len=160)
    with open_subject("smollm2", str(smollm2), options) as subject:
        result = retrieval.measure(subject, options, silent)
    one, six = result.settings
    assert one.accuracy > 0.8 and one.margin > 1
    assert one.accuracy >= six.accuracy > 3 * result.chance
    answers = [part.answer for part in result.attention]
    assert min(answers) > 0.01 and max(answers) < 0.3  # the paper's Transformer: 0.03 to 0.09

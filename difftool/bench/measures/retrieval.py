"""Retrieval: does the model find a number again that stands in a long text, and where does it look?

The multi-needle test of Differential Transformer (arXiv 2410.05258, Tables 2 and 3), scored by
likelihood so that small base models can be scored: of the ten digits the right one must be the most
likely. Chance is one in ten; a model that only sees which numbers stand in the text at all gets one
in N. `bench/needles.py` has the prompts and `bench/needle_attention.py` the figure on attention.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from difftool.bench.measures.perplexity import clustered_stderr
from difftool.bench.needle_attention import last_query_attention
from difftool.bench.needle_scoring import log_likelihoods
from difftool.bench.needles import DEPTHS, NUMBERS, SETTINGS, Haystack, Prompt, Question
from difftool.bench.options import BenchOptions
from difftool.bench.result import Progress
from difftool.bench.retrieval_result import AttentionShare, Result, Score
from difftool.bench.retrieval_tables import headline, tables
from difftool.bench.subject import LanguageModel, Subject, TorchModel
from difftool.bench.text import encode, read_text, text_name
from difftool.errors import UserError

__all__ = ["TITLE", "Result", "headline", "measure", "tables"]

TITLE = "Retrieval"
PROMPTS = 2  # a cell, so that a small model is done in seconds on a CPU; the paper takes 50
OBSERVED = 1  # prompts a depth whose attention is looked at


@dataclass(frozen=True)
class Posed:
    """A prompt: how many needles and questions it has, and how many tokens at most."""

    setting: tuple[int, int]
    length: int
    prompt: Prompt


@dataclass(frozen=True)
class Asked:
    """A question of a prompt and what became of it; numbers are places in NUMBERS."""

    posed: Posed
    question: Question
    likelihoods: tuple[float, ...]

    @property
    def right(self) -> float:
        """1 if the right number is the most likely, a share of it if others are as likely."""
        if any(map(math.isnan, self.likelihoods)):
            return math.nan
        best = max(self.likelihoods)
        return (self.likelihoods[self.question.right] == best) / self.likelihoods.count(best)

    @property
    def margin(self) -> float:
        right = self.question.right
        wrong = self.likelihoods[:right] + self.likelihoods[right + 1 :]
        return self.likelihoods[right] - (math.nan if any(map(math.isnan, wrong)) else max(wrong))

    @property
    def confused(self) -> float:
        best = max(self.likelihoods)
        return float(self.likelihoods.index(best) in self.question.others)


def measure(subject: Subject, options: BenchOptions, progress: Progress) -> Result:
    """Ask for needles in `options.text`; `options.limit` is the number of prompts a cell.

    A prompt has at most `options.seq_len` tokens, or half of it, or of what the model can take.

    Raises:
        UserError: no tokenizer, one without digits, or prompts too short for the needles.
    """
    tokenizer = subject.require_tokenizer()
    start, _ = encode("a", tokenizer)
    haystack = Haystack(read_text(options.text), tokenizer, start)
    whole = min(options.seq_len, _context(subject))
    shortest = haystack.shortest()
    lengths = [length for length in (whole // 2, whole) if length >= shortest]
    if not lengths:
        raise UserError(
            f"prompts of {whole} tokens have no room for {SETTINGS[-1][0]} needles and a question",
            f"{shortest} tokens or more",
            "Give a larger --seq-len",
        )
    prompts = list(_prompts(haystack, lengths, options))
    asked = _ask(subject.model, haystack, prompts, options.batch_size, progress)
    attention, why = _attention(subject, haystack, prompts)
    return Result(
        chance=1 / len(NUMBERS),
        overall=_score(asked),
        settings=tuple(_grouped(asked, lambda one: (*one.posed.setting, None, None))),
        cells=tuple(
            _grouped(asked, lambda one: (*one.posed.setting, one.posed.length, one.question.depth))
        ),
        attention=attention,
        no_attention=why,
        lengths=tuple(lengths),
        left_out=tuple({whole // 2, whole} - {*lengths}),
        text=text_name(options.text),
        seed=options.seed,
    )


def _context(subject: Subject) -> int:
    """Return the tokens that a model was made for, as far as that is known."""
    if not isinstance(subject.model, TorchModel):
        return 2**31
    config = subject.model.module.config.get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or 2**31)


def _prompts(haystack: Haystack, lengths: Sequence[int], options: BenchOptions) -> Iterator[Posed]:
    """Yield the prompts of all cells; one does not depend on how many others there are."""
    for setting in SETTINGS:
        for length in lengths:
            for place in range(len(DEPTHS)):
                for number in range(options.limit or PROMPTS):
                    seed = f"{options.seed} {setting} {length} {place} {number}"
                    yield Posed(setting, length, haystack.prompt(setting, place, length, seed))


def _ask(
    model: LanguageModel,
    haystack: Haystack,
    prompts: Sequence[Posed],
    batch_size: int,
    progress: Progress,
) -> list[Asked]:
    """Put all questions of all prompts, a batch of prompts at a time."""
    found: list[Asked] = []
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        pairs = [
            (posed, haystack.question(posed.prompt, index))
            for posed in batch
            for index in range(posed.prompt.asked)
        ]
        scores = log_likelihoods(model, [question for _, question in pairs], batch_size)
        found += [Asked(*pair, score) for pair, score in zip(pairs, scores, strict=True)]
        progress("retrieval", first + len(batch), len(prompts))
    return found


def _grouped(
    asked: Sequence[Asked], key: Callable[[Asked], tuple[int, int, int | None, float | None]]
) -> Iterator[Score]:
    groups: dict[tuple[int, int, int | None, float | None], list[Asked]] = defaultdict(list)
    for one in asked:
        groups[key(one)].append(one)
    for values, group in sorted(groups.items()):
        yield _score(group, *values)


def _score(
    asked: Sequence[Asked],
    needles: int | None = None,
    count: int | None = None,
    length: int | None = None,
    depth: float | None = None,
) -> Score:
    prompts: dict[int, list[Asked]] = defaultdict(list)
    for one in asked:
        prompts[id(one.posed)].append(one)
    clusters = list(prompts.values())
    accuracy, accuracy_stderr = _mean([[one.right for one in group] for group in clusters])
    margin, margin_stderr = _mean([[one.margin for one in group] for group in clusters])
    return Score(
        needles=needles,
        asked=count,
        length=length,
        depth=depth,
        prompts=len(clusters),
        questions=len(asked),
        accuracy=accuracy,
        accuracy_stderr=accuracy_stderr,
        margin=margin,
        margin_stderr=margin_stderr,
        confused=math.fsum(one.confused for one in asked) / len(asked),
    )


def _mean(clusters: Sequence[Sequence[float]]) -> tuple[float, float | None]:
    """Return the mean of all values and its standard error, if there is more than one cluster."""
    sums = [(math.fsum(cluster), len(cluster)) for cluster in clusters]
    mean = math.fsum(total for total, _ in sums) / sum(size for _, size in sums)
    return mean, clustered_stderr(sums) if len(sums) > 1 else None


def _attention(
    subject: Subject, haystack: Haystack, prompts: Sequence[Posed]
) -> tuple[tuple[AttentionShare, ...], str]:
    """Return the attention at the first question of the hardest, longest prompts; or why not."""
    longest = max(posed.length for posed in prompts)
    by_depth: dict[float, list[Prompt]] = defaultdict(list)
    for posed in prompts:
        if posed.setting == SETTINGS[-1] and posed.length == longest:
            by_depth[posed.prompt.needles[0].depth].append(posed.prompt)
    try:
        return tuple(
            _share(subject, haystack, depth, some[:OBSERVED])
            for depth, some in sorted(by_depth.items())
        ), ""
    except UserError as error:
        return (), str(error)


def _share(
    subject: Subject, haystack: Haystack, depth: float, prompts: Sequence[Prompt]
) -> AttentionShare:
    parts = [attention_parts(subject, haystack, prompt) for prompt in prompts]
    means = {name: math.fsum(part[name] for part in parts) / len(parts) for name in parts[0]}
    return AttentionShare(depth=depth, prompts=len(parts), **means)


def attention_parts(subject: Subject, haystack: Haystack, prompt: Prompt) -> dict[str, float]:
    """Return the last query's attention at the first question, by part, averaged over layers.

    The last query is the token before the number; the parts are those of `AttentionShare`.
    """
    ids = haystack.question(prompt, 0).shared
    text = prompt.before_answer(0)
    begin, end = haystack.token_span(text, ids, prompt.spans[0])
    _, haystack_end = haystack.token_span(text, ids, (0, len(prompt.context)))
    weights = last_query_attention(subject.module, torch.tensor(ids)).double().mean(0)
    answer = weights[max(begin, 1) : end].sum().item()
    return {
        "answer": answer,
        "noise": weights[1:haystack_end].sum().item() - answer,
        "question": weights[haystack_end:].sum().item(),
        "first": weights[0].item(),
    }

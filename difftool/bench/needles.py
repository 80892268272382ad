"""Prompts of the multi-needle test: sentences to find again in a long text about other things.

N needles "The magic number of CITY is NUMBER." lie in a haystack and R of the cities are asked for
(Differential Transformer, arXiv 2410.05258, Table 2, after Gemini 1.5 and Large World Model). An
asked needle lies at one of five depths, the others anywhere. A number is one digit: it is one token
to nearly every tokenizer, so that one forward pass tells the likelihoods of all ten of them.
"""

import bisect
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from transformers import PreTrainedTokenizerBase

from difftool.errors import UserError

SETTINGS = ((1, 1), (2, 2), (4, 2), (6, 2))  # needles, and how many of them are asked for
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the haystack, by characters
NUMBERS = tuple("0123456789")
CITIES = (
    *("Athens", "Berlin", "Boston", "Cairo", "Chicago", "Delhi", "Dublin", "Geneva"),
    *("Havana", "Lima", "Lisbon", "London", "Madrid", "Moscow", "Nairobi", "Oslo"),
    *("Paris", "Prague", "Rome", "Seoul", "Sydney", "Tokyo", "Vienna", "Warsaw"),
)
LEAST = 16  # tokens of haystack, below which there is nothing to search in
_CHARACTERS = 16  # of haystack to choose from, for every token of a prompt
# a line or a sentence of up to 200 characters; where there is none, words; where none, characters
_PIECE = re.compile(r".{1,200}?(?:\n|[.!?]\s)|.{1,200}(?:\s|$)|.{1,200}", re.DOTALL)


@dataclass(frozen=True)
class Needle:
    """A city, the place of its number in NUMBERS, and its depth in the haystack."""

    city: str
    number: int
    depth: float

    @property
    def sentence(self) -> str:
        return f"{question_of(self.city)} {NUMBERS[self.number]}."


@dataclass(frozen=True)
class Prompt:
    """A haystack with its needles and the questions after it.

    Attributes:
        needles: the asked ones first.
        asked: how many are.
        context: the haystack with the needles in it.
        spans: of each needle in `context`, in characters.
    """

    needles: tuple[Needle, ...]
    asked: int
    context: str
    spans: tuple[tuple[int, int], ...]

    def before_answer(self, index: int) -> str:
        """Return the text up to the number of an asked city; the answers before it are right."""
        cities = [needle.city for needle in self.needles[: self.asked]]
        asked = f"is the magic number of {cities[0]}"
        if len(cities) > 1:
            asked = f"are the magic numbers of {' and '.join(cities)}"
        answers = [needle.sentence for needle in self.needles[:index]]
        answers.append(question_of(cities[index]))
        return f"{self.context}\n\nQuestion: What {asked}?\nAnswer: {' '.join(answers)}"


@dataclass(frozen=True)
class Question:
    """One asked city, in tokens.

    Attributes:
        shared: what all candidates begin with: the text before the number, and perhaps more.
        tails: of each of NUMBERS, the tokens that tell it from the others.
        right: which of NUMBERS is right.
        others: the numbers of the other needles.
        depth: where the needle lies.
    """

    shared: list[int]
    tails: list[list[int]]
    right: int
    others: frozenset[int]
    depth: float


def question_of(city: str) -> str:
    """Return a needle's sentence up to its number."""
    return f"The magic number of {city} is"


class Haystack:
    """A text to hide needles in; past its end it begins again.

    Args:
        text: any.
        tokenizer: that counts a prompt's length.
        start: tokens that it puts before a text.
    """

    def __init__(self, text: str, tokenizer: PreTrainedTokenizerBase, start: list[int]) -> None:
        self.pieces = _PIECE.findall(text)
        self.tokenizer, self.start = tokenizer, start

    def shortest(self) -> int:
        """Return the tokens of the shortest prompt that a haystack fits into, in any setting."""
        longest = sorted(CITIES, key=lambda city: len(self._ids(f" {city}")))
        needles, asked = SETTINGS[-1]
        several = tuple(Needle(city, 0, 0.0) for city in longest[-needles:])
        return self._length(compose([], several, asked)) + LEAST

    def prompt(self, setting: tuple[int, int], place: int, length: int, seed: str) -> Prompt:
        """Return a prompt of at most `length` tokens with its answers, the same for a seed.

        The i-th asked needle lies at the depth `place + 2·i`, counted around, so that all depths
        get as many first as second questions.
        """
        generator = random.Random(seed)
        needles, asked = setting
        cities = generator.sample(CITIES, needles)
        numbers = generator.sample(range(len(NUMBERS)), needles)
        depths = [DEPTHS[(place + 2 * index) % len(DEPTHS)] for index in range(asked)]
        depths += [generator.random() for _ in range(needles - asked)]
        hidden = tuple(map(Needle, cities, numbers, depths))
        pieces = self._pieces(generator.randrange(len(self.pieces)), length * _CHARACTERS)
        count = bisect.bisect_right(
            range(len(pieces) + 1),
            length,
            key=lambda count: self._length(compose(pieces[:count], hidden, asked)),
        )
        return compose(pieces[: max(count - 1, 0)], hidden, asked)

    def question(self, prompt: Prompt, index: int) -> Question:
        """Return one of a prompt's questions in tokens.

        Raises:
            UserError: the tokenizer cannot tell the numbers apart.
        """
        before = prompt.before_answer(index)
        candidates = [self.start + self._ids(f"{before} {number}") for number in NUMBERS]
        same = common_length(*candidates)
        tails = [ids[same:] for ids in candidates]
        if not all(tails) or len(set(map(tuple, tails))) < len(tails):
            raise UserError("the tokenizer does not tell the digits apart", "a token for each")
        needle = prompt.needles[index]
        numbers = frozenset(other.number for other in prompt.needles)
        return Question(
            candidates[0][:same], tails, needle.number, numbers - {needle.number}, needle.depth
        )

    def token_span(self, text: str, ids: list[int], span: tuple[int, int]) -> tuple[int, int]:
        """Return which of a text's token ids hold some of its characters `span`.

        A tokenizer need not tell offsets: tokens are counted in the text up to either end.
        """
        before, until = (self.start + self._ids(text[:end]) for end in span)
        last = common_length(until, ids)
        return common_length(before, ids), last + (last < len(until))

    def _pieces(self, first: int, characters: int) -> list[str]:
        pieces: list[str] = []
        while characters > 0:
            pieces.append(self.pieces[(first + len(pieces)) % len(self.pieces)])
            characters -= len(pieces[-1])
        return pieces

    def _length(self, prompt: Prompt) -> int:
        """Return the tokens of a prompt with all its answers."""
        text = prompt.before_answer(prompt.asked - 1)
        return len(self.start) + len(self._ids(f"{text} {NUMBERS[0]}"))

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


def compose(pieces: Sequence[str], needles: tuple[Needle, ...], asked: int) -> Prompt:
    """Return a prompt whose haystack is these pieces, with each needle between two of them."""
    ends = [0]
    for piece in pieces:
        ends.append(ends[-1] + len(piece))
    places = [bisect.bisect_left(ends, needle.depth * ends[-1]) for needle in needles]
    context, spans = "", {}
    for place in range(len(ends)):
        for index in [i for i, wanted in enumerate(places) if wanted == place]:
            context += "" if not context or context[-1].isspace() else " "
            spans[index] = (len(context), len(context) + len(needles[index].sentence))
            context += needles[index].sentence + ("\n" if context[-1:] in ("", "\n") else " ")
        context += pieces[place] if place < len(pieces) else ""
    return Prompt(needles, asked, context, tuple(spans[index] for index in range(len(needles))))


def common_length(*sequences: Sequence[int]) -> int:
    """Return how many elements the sequences have in common at their beginning."""
    alike = takewhile(lambda column: len(set(column)) == 1, zip(*sequences, strict=False))
    return sum(1 for _ in alike)

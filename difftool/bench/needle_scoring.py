"""Log-likelihoods of all candidates of many questions, with as few forward passes as there must be.

Candidates that differ in their last token only, and questions of one text, share a pass: a row of
tokens tells what may follow each of its beginnings.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch

from difftool.bench.needles import Question
from difftool.bench.subject import LanguageModel


@torch.no_grad()
def log_likelihoods(
    model: LanguageModel, questions: Sequence[Question], batch_size: int
) -> list[tuple[float, ...]]:
    """Return for each question the log-likelihood of each number, in nats.

    Only the tokens that tell a number from the others count; what all share would add the same.
    """
    rows = distinct_rows(
        [question.shared + tail[:-1] for question in questions for tail in question.tails]
    )
    found = _next_tokens(model, rows, _wanted(questions, rows), batch_size)
    return [
        tuple(
            sum(
                found[_row(rows, question.shared + tail[:place]), len(question.shared) + place - 1][
                    token
                ].item()
                for place, token in enumerate(tail)
            )
            for tail in question.tails
        )
        for question in questions
    ]


def distinct_rows(sequences: Sequence[list[int]]) -> list[list[int]]:
    """Return the sequences that are not the beginning of another one, longest first."""
    rows: list[list[int]] = []
    for sequence in sorted(sequences, key=len, reverse=True):
        if not any(row[: len(sequence)] == sequence for row in rows):
            rows.append(sequence)
    return rows


def _row(rows: Sequence[list[int]], beginning: list[int]) -> int:
    return next(i for i, row in enumerate(rows) if row[: len(beginning)] == beginning)


def _wanted(questions: Sequence[Question], rows: Sequence[list[int]]) -> dict[int, set[int]]:
    """Return for each row the places whose next token matters."""
    wanted: dict[int, set[int]] = defaultdict(set)
    for question in questions:
        for tail in question.tails:
            for place in range(len(tail)):
                before = question.shared + tail[:place]
                wanted[_row(rows, before)].add(len(before) - 1)
    return wanted


def _next_tokens(
    model: LanguageModel, rows: Sequence[list[int]], wanted: dict[int, set[int]], batch_size: int
) -> dict[tuple[int, int], torch.Tensor]:
    """Return log-probabilities [V] of what follows, in float32, by row and place."""
    found = {}
    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        tokens = torch.zeros(len(batch), len(batch[0]), dtype=torch.long)  # nothing looks ahead
        for index, row in enumerate(batch):
            tokens[index, : len(row)] = torch.tensor(row)
        logits = model.logits(tokens)
        for index in range(len(batch)):
            for place in wanted[first + index]:
                found[first + index, place] = logits[index, place].float().log_softmax(-1).cpu()
    return found

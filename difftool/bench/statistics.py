"""Statistics of streams of numbers in constant memory, and what they tell of outliers.

Moments merge in float64 by the formulas of Pébay (SAND2008-6212), after Chan, Golub and LeVeque.
The median comes from a histogram of magnitudes whose bins are the leading bits of a float32: 128
bins to every power of two, evenly wide inside it, so a bin's middle is within 1/256 (0.4 %) of all
that fell into it. Largest magnitudes are exact. A NaN stays to be seen, as the largest of them.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

CHUNK = 2**18  # numbers that are held in float64 at a time
KEPT = 100  # largest magnitudes
_SHIFT = 16  # of a float32's 31 bits behind the sign, these do not decide the bin
_BINS = 2 ** (31 - _SHIFT)
_EVEN_BINS = 4096  # of numbers whose bounds are known


@dataclass(frozen=True)
class Moments:
    """Count, mean, and sums of the 2nd, 3rd and 4th powers of what deviates from the mean."""

    count: int
    mean: float
    second: float
    third: float
    fourth: float

    @property
    def kurtosis(self) -> float:
        """The 4th standardised moment: 3 for a normal distribution, NaN for a constant."""
        return self.count * self.fourth / self.second**2 if self.second else math.nan

    def merge(self, other: "Moments") -> "Moments":
        """Return the moments of both together."""
        a, b = self.count, other.count
        n, delta = a + b, other.mean - self.mean
        third = (
            self.third
            + other.third
            + delta**3 * a * b * (a - b) / n**2
            + 3 * delta * (a * other.second - b * self.second) / n
        )
        fourth = (
            self.fourth
            + other.fourth
            + delta**4 * a * b * (a * a - a * b + b * b) / n**3
            + 6 * delta**2 * (a * a * other.second + b * b * self.second) / n**2
            + 4 * delta * (a * other.third - b * self.third) / n
        )
        second = self.second + other.second + delta**2 * a * b / n
        return Moments(n, self.mean + delta * b / n, second, third, fourth)


@dataclass(frozen=True)
class Statistics:
    """What is kept of any amount of numbers.

    Attributes:
        moments: of the numbers.
        largest: up to 100 largest magnitudes in float32, in descending order.
        histogram: [bins] of magnitudes.
    """

    moments: Moments
    largest: torch.Tensor
    histogram: torch.Tensor

    def merge(self, other: "Statistics") -> "Statistics":
        """Return the statistics of both together."""
        bits = torch.cat([self.largest, other.largest]).view(torch.int32)  # NaN above infinity
        return Statistics(
            self.moments.merge(other.moments),
            bits.sort(descending=True).values[:KEPT].view(torch.float32),
            self.histogram + other.histogram,
        )

    def top(self, rank: int) -> float:
        """Return the magnitude of this rank, from 1 to 100; NaN where there are fewer numbers."""
        return self.largest[rank - 1].item() if rank <= len(self.largest) else math.nan

    @property
    def median(self) -> float:
        """The median magnitude (the lower one of two), within 0.4 %; 0 below 1e-38."""
        reached = self.histogram.cumsum(0) >= (self.moments.count + 1) // 2
        middle = (int(reached.int().argmax()) << _SHIFT) + 2 ** (_SHIFT - 1)
        value = torch.tensor(middle, dtype=torch.int32).view(torch.float32).item()
        return value if value >= torch.finfo(torch.float32).tiny else 0.0


def describe(values: torch.Tensor) -> Statistics:
    """Return the statistics of all elements of a tensor that has some."""
    return merge_all(_describe(chunk) for chunk in torch.split(values.reshape(-1), CHUNK))


def merge_all(parts: Iterable[Statistics]) -> Statistics:
    """Return the statistics of several parts together."""
    return reduce(Statistics.merge, parts)


def _describe(values: torch.Tensor) -> Statistics:
    bits = values.float().abs().view(torch.int32)  # in the order of the magnitudes
    bins = bits >> _SHIFT
    histogram = bins.bincount(minlength=_BINS)
    above = histogram.flip(0).cumsum(0)  # how many are in this bin or a higher one
    lowest = _BINS - 1 - int((above >= min(KEPT, len(bits))).int().argmax())
    candidates = bits[bins >= lowest]
    largest = candidates.topk(min(KEPT, len(bits))).values.view(torch.float32)
    return Statistics(_moments(values), largest, histogram)


def _moments(values: torch.Tensor) -> Moments:
    numbers = values.double()
    mean = numbers.mean()
    deviations = numbers - mean
    squares = deviations.square()
    return Moments(
        len(values),
        mean.item(),
        squares.sum().item(),
        squares.dot(deviations).item(),
        squares.dot(squares).item(),
    )


@dataclass(frozen=True)
class ColumnStatistics:
    """What is kept of numbers between two bounds that come in columns, such as one per head.

    Attributes:
        count: numbers in a column.
        total: [columns] their sums in float64.
        squares: [columns] the sums of their squares.
        histogram: [bins] of all columns, in even bins between the bounds.
        bounds: least and greatest possible number.
    """

    count: int
    total: torch.Tensor
    squares: torch.Tensor
    histogram: torch.Tensor
    bounds: tuple[float, float]

    def merge(self, other: "ColumnStatistics") -> "ColumnStatistics":
        """Return the statistics of both together."""
        return ColumnStatistics(
            self.count + other.count,
            self.total + other.total,
            self.squares + other.squares,
            self.histogram + other.histogram,
            self.bounds,
        )

    @property
    def means(self) -> torch.Tensor:
        """Mean of each column."""
        return self.total / self.count

    @property
    def deviations(self) -> torch.Tensor:
        """Standard deviation of each column."""
        return (self.squares / self.count - self.means.square()).clamp_min(0).sqrt()


def describe_columns(values: torch.Tensor, bounds: tuple[float, float]) -> ColumnStatistics:
    """Return the statistics of values [..., columns], which rounding may take over the bounds."""
    numbers = values.flatten(0, -2)
    low, high = bounds
    places = (numbers.float().nan_to_num(low) - low) / (high - low) * _EVEN_BINS
    histogram = places.long().clamp(0, _EVEN_BINS - 1).flatten().bincount(minlength=_EVEN_BINS)
    numbers = numbers.double()
    return ColumnStatistics(
        len(numbers), numbers.sum(0), numbers.square().sum(0), histogram, bounds
    )


def quantile(parts: Sequence[ColumnStatistics], share: float) -> float:
    """Return what a share of all numbers lies below, within half of 1/4096 of their range."""
    histogram = torch.stack([part.histogram for part in parts]).sum(0)
    if not all(part.total.isfinite().all() for part in parts):
        return math.nan
    low, high = parts[0].bounds
    reached = histogram.cumsum(0) >= share * histogram.sum()
    return low + (int(reached.int().argmax()) + 0.5) * (high - low) / _EVEN_BINS

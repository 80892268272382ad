"""What the measure of retrieval finds, as it stands in report.json."""

from pydantic import Field

from difftool.bench.result import MeasureResult


class Score(MeasureResult):
    """What was found on some of the questions; None where they differ."""

    needles: int | None = Field(description="N")
    asked: int | None = Field(description="R")
    length: int | None = Field(description="tokens of a prompt, at most")
    depth: float | None = Field(description="of the asked needle in the haystack")
    prompts: int
    questions: int
    accuracy: float = Field(description="right number the most likely; a tie counts its share")
    accuracy_stderr: float | None = Field(description="the questions of a prompt being dependent")
    margin: float = Field(description="mean log-likelihood over the best wrong number's, in nats")
    margin_stderr: float | None
    confused: float = Field(description="share of questions answered with another needle's number")


class AttentionShare(MeasureResult):
    """Where the last query before the number looks; the four shares add up to 1."""

    depth: float
    prompts: int
    answer: float = Field(description="the asked needle's sentence")
    noise: float = Field(description="the rest of the haystack, other needles included")
    question: float = Field(description="what comes after the haystack")
    first: float = Field(description="the first token, a sink in many models")


class Result(MeasureResult):
    """Accuracy by setting and by cell, and attention by depth."""

    chance: float = Field(description="accuracy of a guess")
    overall: Score
    settings: tuple[Score, ...] = Field(description="by needles and asked, over all cells")
    cells: tuple[Score, ...] = Field(description="by needles, asked, length and depth")
    attention: tuple[AttentionShare, ...] = Field(
        description="most needles, whole length, by depth"
    )
    no_attention: str = Field(description="why attention is empty, or nothing")
    lengths: tuple[int, ...] = Field(description="tokens of a prompt: half and whole")
    left_out: tuple[int, ...] = Field(description="lengths that needles and questions fill up")
    text: str = Field(description="what the haystacks are cut from")
    seed: int

"""What a bench is asked to do; the command's options and a recipe's keys are these fields."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from difftool.bench.measures import default_measures
from difftool.errors import UserError


class BenchOptions(BaseModel):
    """Options of `bench`.

    Every measure takes `limit`, `seq_len`, `batch_size` and `seed` from here, so that one word on
    the command line means one thing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    measures: tuple[str, ...] = Field(default_factory=default_measures)
    text: Path | None = Field(None, description="UTF-8 text to measure on; None is the built-in")
    tasks: tuple[str, ...] = ()
    tasks_dir: Path | None = None
    limit: int | None = Field(None, ge=1, description="windows, documents or prompts a measure")
    seq_len: int = Field(512, ge=2, description="tokens in a window")
    stride: int | None = Field(None, ge=1, description="tokens between windows; None is half")
    batch_size: int = Field(4, ge=1)
    speed_batch_sizes: tuple[int, ...] = (1, 4)
    speed_contexts: tuple[int, ...] = (128, 512)
    repetitions: int = Field(5, ge=1, description="of each timing, after one warm-up")
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    device: str | None = Field(None, description="cpu, cuda, cuda:1; None takes a GPU if there")
    compile: bool = Field(False, description="run speed under torch.compile")
    seed: int = 0
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stride is not None and self.stride > self.seq_len:
            raise ValueError(
                f"stride {self.stride} is more than seq_len {self.seq_len}: tokens would be skipped"
            )
        return self


def parse_options(**settings: Any) -> BenchOptions:
    """Return the options; a UserError says what is wrong with them."""
    try:
        return BenchOptions(**settings)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = f"option {fault['loc'][0]}" if fault["loc"] else "the options"
        raise UserError(f"{where} cannot be used: {fault['msg']}") from error

"""The figures of a run: throughput, latency, how full the batch was. Pure."""

import statistics
from collections.abc import Collection
from dataclasses import dataclass

from chairlift.seats import Step


@dataclass(frozen=True, slots=True)
class Answer:
    """What one question got. Times in seconds since all were asked."""

    name: str
    text: str
    num_tokens: int
    first_token_seconds: float
    total_seconds: float


@dataclass(frozen=True, slots=True)
class Figures:
    """One run in numbers. Times in seconds."""

    tokens_per_second: float
    mean_first_token: float
    median_first_token: float
    mean_total: float
    num_steps: int
    mean_width: float
    """Rows of a step that computed something for somebody."""

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_second:6.1f} tokens/s   first token {self.mean_first_token:5.2f} s mean, "
            f"{self.median_first_token:5.2f} s p50   whole answer {self.mean_total:5.2f} s mean   "
            f"{self.num_steps:5} iterations   mean width {self.mean_width:.2f}"
        )


def figures(answers: Collection[Answer], steps: Collection[Step]) -> Figures:
    """Of at least one answer, and the steps that made them; the run ends with the last answer."""
    first_tokens = [answer.first_token_seconds for answer in answers]
    num_rows = sum(not member.padding for step in steps for member in step.members)
    return Figures(
        tokens_per_second=sum(answer.num_tokens for answer in answers)
        / max(answer.total_seconds for answer in answers),
        mean_first_token=statistics.fmean(first_tokens),
        median_first_token=statistics.median(first_tokens),
        mean_total=statistics.fmean(answer.total_seconds for answer in answers),
        num_steps=len(steps),
        mean_width=num_rows / max(len(steps), 1),
    )

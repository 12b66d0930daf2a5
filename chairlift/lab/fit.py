"""Prices of a step from steps that were measured: least squares, none below zero. Pure.

    duration ≈ base + per_token · tokens + per_row · rows + per_context_token · context      microseconds

What is minimized is the error divided by a duration: in the first of five rounds by the measured one, in each
later one by what the fit before expects. So short steps count as much as long ones. A step that was disturbed
counts for no more because it took long; if it were divided by its own duration, it would count for less. A
price that would come out below zero means that its column explains nothing that the others do not: the best
fit without it is taken. With four columns, every choice of them can be tried.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations

from chairlift.lab.records import quantile
from chairlift.lab.step_times import Linear

MIN_STEPS = 8
_ROUNDS = 5
_NAMES = ("base_us", "per_token_us", "per_row_us", "per_context_token_us")
_Prices = dict[int, float]  # by column


@dataclass(frozen=True, slots=True)
class Measured:
    """One step: what it computed, and how long it took."""

    num_tokens: int
    num_rows: int
    num_context_tokens: int  # read, each row's once
    microseconds: float

    @property
    def columns(self) -> tuple[float, ...]:
        """In the order of the prices."""
        return (1.0, float(self.num_tokens), float(self.num_rows), float(self.num_context_tokens))


@dataclass(frozen=True, slots=True)
class Fit:
    """Prices, and how far they are off: shares of a step's duration."""

    prices: Linear
    num_steps: int
    error_p50: float
    error_p90: float
    error_of_total: float  # of all steps together, above 0 where the prices are too high

    @property
    def sentence(self) -> str:
        """For people."""
        return (
            f"{self.num_steps} steps: {100 * self.error_p50:.1f} % off in the median, "
            f"{100 * self.error_p90:.1f} % for 9 in 10, {100 * self.error_of_total:+.1f} % all together"
        )

    def as_json(self) -> dict[str, float]:
        """What `--step-times` reads."""
        return {name: round(value, 4) for name, value in asdict(self.prices).items()}


class FitError(ValueError):
    """Steps that no prices can be taken from: a sentence."""


def fit(steps: Sequence[Measured]) -> Fit:
    """The best prices. Raises FitError."""
    if len(steps) < MIN_STEPS:
        raise FitError(f"{len(steps)} steps were measured: at least {MIN_STEPS} are wanted")
    if not all(step.microseconds > 0 for step in steps):
        raise FitError("a step took no time: the clock that measured it is no use")
    expected = [step.microseconds for step in steps]
    for _ in range(_ROUNDS):
        prices = _best(steps, expected)
        expected = [_predicted(step, prices) for step in steps]
    errors = [us / step.microseconds - 1 for us, step in zip(expected, steps, strict=True)]
    ordered = sorted(map(abs, errors))
    return Fit(
        Linear(**{name: prices.get(index, 0.0) for index, name in enumerate(_NAMES)}),
        len(steps),
        quantile(ordered, 0.5),
        quantile(ordered, 0.9),
        sum(expected) / sum(step.microseconds for step in steps) - 1,
    )


def _best(steps: Sequence[Measured], expected: Sequence[float]) -> _Prices:
    """Of all choices of columns with no price below zero, the one with the least error."""
    best: tuple[float, _Prices] | None = None
    for count in range(1, len(_NAMES) + 1):
        for chosen in combinations(range(len(_NAMES)), count):
            solved = _solved(steps, expected, chosen)
            if solved is None or min(solved) < 0 or not {0, 1} & set(chosen):
                continue  # without one of those two, an empty step could take no time
            prices = dict(zip(chosen, solved, strict=True))
            error = sum(
                ((_predicted(step, prices) - step.microseconds) / us) ** 2
                for step, us in zip(steps, expected, strict=True)
            )
            if best is None or error < best[0] * (1 - 1e-9):
                best = error, prices
    assert best is not None  # a constant always fits
    return best[1]


def _predicted(step: Measured, prices: _Prices) -> float:
    columns = step.columns
    return sum(price * columns[index] for index, price in prices.items())


def _solved(
    steps: Sequence[Measured], expected: Sequence[float], chosen: tuple[int, ...]
) -> list[float] | None:
    """Prices of these columns by the normal equations; None when one column is made of the others."""
    scales = [max(step.columns[index] for step in steps) or 1.0 for index in chosen]
    rows = [
        [step.columns[index] / scale / us for index, scale in zip(chosen, scales, strict=True)]
        for step, us in zip(steps, expected, strict=True)
    ]
    wanted = [step.microseconds / us for step, us in zip(steps, expected, strict=True)]
    size = len(chosen)
    matrix = [
        [sum(row[i] * row[j] for row in rows) for j in range(size)]
        + [sum(row[i] * value for row, value in zip(rows, wanted, strict=True))]
        for i in range(size)
    ]
    for at in range(size):
        pivot = max(range(at, size), key=lambda i: abs(matrix[i][at]))
        matrix[at], matrix[pivot] = matrix[pivot], matrix[at]
        if abs(matrix[at][at]) <= 1e-12 * abs(matrix[0][0] or 1.0):
            return None
        for i in range(size):
            if i != at:
                factor = matrix[i][at] / matrix[at][at]
                matrix[i] = [a - factor * b for a, b in zip(matrix[i], matrix[at], strict=True)]
    return [matrix[i][size] / matrix[i][i] / scales[i] for i in range(size)]

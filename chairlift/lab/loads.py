"""Loads: when requests arrive, with how long a prompt, for how long an answer.

Requests are drawn one by one; the same seed gives the same ones.

Lengths come from a trace or from a distribution, arrival times from a trace's rhythm or from a process:

    lengths      `128` always; `uniform:32,512`; `exponential:161` (mean, at least 1, rounded)
    arrivals     at-once; even; poisson; gamma:CV, whose gaps vary by CV times their mean (above 1: bursts)

A trace is a CSV file with the columns arrival_s, prompt_tokens and output_tokens, or lines of JSON with these
names and, if prompts share beginnings, hash_ids: one id for each 512 tokens. A load longer than its trace
repeats the trace after its end. Every fault in a file is reported with its line.
"""

import csv
import json
import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice, repeat
from pathlib import Path

from chairlift.lab.loop import Arrival
from scheduler.token_ids import TokenIds

HASHED_TOKENS = 512  # that one hash id stands for
MAX_LENGTH = 1 << 20  # tokens of a prompt or an output
_TAIL: TokenIds = array("I", range(1 << 14))
_MAX_ID = (1 << 32) // HASHED_TOKENS


class LoadError(ValueError):
    """A load that cannot be: a sentence with the place."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace; `time` in seconds from its first one, None where the trace tells none."""

    time: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()


# --- traces ----------------------------------------------------------------------------------------------


def read_trace(path: Path) -> list[Row]:
    """All of a file, its times from its first row: it may be a cut of a longer one. Raises LoadError."""
    rows: list[Row] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            records = _json_lines(path, file) if path.suffix == ".jsonl" else _csv_lines(path, file)
            for line, record in records:
                row = _row(f"{path}, line {line}", record)
                previous = rows[-1].time if rows else None
                if row.time is not None and previous is not None and row.time < previous:
                    raise LoadError(
                        f"{path}, line {line}: arrival_s is {row.time:g}, "
                        f"before the {previous:g} of the line above"
                    )
                rows.append(row)
    except OSError as error:
        raise LoadError(f"the trace {path} cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise LoadError(f"the trace {path} cannot be read: {error}") from error
    if not rows:
        raise LoadError(f"the trace {path} holds no requests")
    first = next((row.time for row in rows if row.time is not None), 0.0)
    return [row if row.time is None else replace(row, time=row.time - first) for row in rows]


def _json_lines(path: Path, file: Iterator[str]) -> Iterator[tuple[int, dict[str, object]]]:
    for line, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise LoadError(f"{path}, line {line}: {error}") from error
        if not isinstance(record, dict):
            raise LoadError(f"{path}, line {line}: an object is wanted")
        yield line, record


def _csv_lines(path: Path, file: Iterator[str]) -> Iterator[tuple[int, dict[str, object]]]:
    reader = csv.DictReader(file)
    for name in ("arrival_s", "prompt_tokens", "output_tokens"):
        if name not in (reader.fieldnames or ()):
            raise LoadError(f"{path}, line 1: the column {name} is missing")
    for record in reader:
        yield reader.line_num, dict(record)


def _row(place: str, record: dict[str, object]) -> Row:
    time = record.get("arrival_s")
    if time == "":
        time = None
    num_prompt_tokens = _length(place, record, "prompt_tokens")
    hash_ids = record.get("hash_ids") or ()
    if not isinstance(hash_ids, list | tuple) or not all(
        type(item) is int and 0 <= item < _MAX_ID for item in hash_ids
    ):
        raise LoadError(f"{place}: hash_ids must be a list of whole numbers from 0 to {_MAX_ID - 1}")
    if hash_ids and len(hash_ids) * HASHED_TOKENS < num_prompt_tokens:
        raise LoadError(
            f"{place}: {len(hash_ids)} hash_ids stand for {len(hash_ids) * HASHED_TOKENS} tokens, "
            f"the prompt has {num_prompt_tokens}"
        )
    return Row(
        None if time is None else _seconds(place, time),
        num_prompt_tokens,
        _length(place, record, "output_tokens"),
        tuple(hash_ids),
    )


def _seconds(place: str, value: object) -> float:
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        seconds = -1.0
    if not 0 <= seconds < 1e12:  # noqa: PLR2004 - refuses NaN and infinity as well
        raise LoadError(f"{place}: arrival_s is {value!r}, a number of seconds >= 0 is wanted")
    return seconds


def _length(place: str, record: dict[str, object], name: str) -> int:
    value = record.get(name)
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if type(number) is not int or not 1 <= number <= MAX_LENGTH:
        raise LoadError(f"{place}: {name} is {value!r}, a whole number from 1 to {MAX_LENGTH} is wanted")
    return number


# --- distributions ---------------------------------------------------------------------------------------


def lengths(text: str) -> Callable[[random.Random], int]:
    """What draws one length. Raises LoadError."""
    name, _, rest = text.partition(":")
    try:
        numbers = [float(part) for part in (rest or name).split(",")]
    except ValueError:
        numbers = []
    if not all(1 <= number <= MAX_LENGTH for number in numbers):
        numbers = []
    match (name if rest else "", numbers):
        case ("", [length]) if length == int(length):
            return lambda _: int(length)
        case ("uniform", [low, high]) if low <= high and low == int(low) and high == int(high):
            return lambda rng: rng.randint(int(low), int(high))
        case ("exponential", [mean]):
            return lambda rng: min(MAX_LENGTH, max(1, round(rng.expovariate(1 / mean))))
    raise LoadError(
        f"{text!r} is no length: 128, uniform:32,512 or exponential:161 are, of 1 to {MAX_LENGTH} tokens"
    )


def tenants(text: str) -> tuple[tuple[str, float], ...]:
    """Names and shares: `a:1,b:2`. Raises LoadError."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, share = part.partition(":")
        try:
            found[name] = float(share or 1)
        except ValueError:
            found[name] = -1.0
        if not name or not 0 < found[name] < 1e9:  # noqa: PLR2004 - a share, and no infinity
            raise LoadError(f"{part!r} is no tenant: NAME or NAME:SHARE with a share above 0 is")
    return tuple(found.items())


def gaps(text: str, rate: float) -> Callable[[random.Random], float]:
    """What draws the seconds from one arrival to the next, `rate` a second in the mean. Raises LoadError."""
    name, _, rest = text.partition(":")
    if text == "at-once":
        return lambda _: 0.0
    if text == "even":
        return lambda _: 1 / rate
    if text == "poisson":
        return lambda rng: rng.expovariate(rate)
    if name == "gamma":
        try:
            variation = float(rest)
        except ValueError:
            variation = 0.0
        if 0 < variation <= 100:  # noqa: PLR2004 - beyond, no load is long enough to show its mean
            shape = variation**-2
            return lambda rng: rng.gammavariate(shape, 1 / (shape * rate))
    raise LoadError(
        f"{text!r} is no arrivals: trace, at-once, even, poisson or gamma:CV with 0 < CV <= 100 are"
    )


# --- loads -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """What a load is made of; times in seconds.

    `rows` or both lengths say how long; `arrivals` says when, and `rate` how many a second: absent, the
    trace's own rhythm. `max_tokens` is what clients allow; absent, they know how long the answer will be.
    """

    num_requests: int
    rows: tuple[Row, ...] = ()
    prompt: str = ""
    output: str = ""
    arrivals: str = "poisson"
    rate: float | None = None
    max_tokens: int | None = None
    tenants: tuple[tuple[str, float], ...] = (("", 1.0),)  # names, and how often each asks
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses what cannot be drawn. Raises LoadError."""
        if self.num_requests < 1:
            raise LoadError(f"{self.num_requests} requests are no load: at least 1 is wanted")
        if self.rate is not None and not 0 < self.rate < 1e9:  # noqa: PLR2004 - a rate, and no infinity
            raise LoadError(f"the rate is {self.rate:g} requests a second: it must be above 0 and below 1e9")
        if self.max_tokens is not None and not 1 <= self.max_tokens <= MAX_LENGTH:
            raise LoadError(f"max_tokens is {self.max_tokens}: from 1 to {MAX_LENGTH} is wanted")
        self._check_hash_ids()
        if not self.rows:
            lengths(self.prompt)
            lengths(self.output)
        if self.arrivals != "trace":
            gaps(self.arrivals, 1.0)
            if self.rate is None and self.arrivals != "at-once":
                raise LoadError(f"arrivals {self.arrivals!r} need a rate: --rate, requests a second")
        elif not self.rows:
            raise LoadError("arrivals 'trace' need a trace")
        elif any(row.time is None for row in self.rows):
            raise LoadError("the trace tells no arrival times: choose arrivals and a rate")
        elif not self._span:
            raise LoadError("the trace's requests come all at once: choose arrivals and a rate")

    @property
    def _span(self) -> float:
        """Seconds from the start of the trace to its start over: one mean gap beyond its last arrival."""
        last = self.rows[-1].time or 0.0
        return last * len(self.rows) / max(1, len(self.rows) - 1)

    def _check_hash_ids(self) -> None:
        num_laps = -(-self.num_requests // max(1, len(self.rows)))
        if num_laps * self._ids_per_lap > _MAX_ID:
            raise LoadError(
                f"{self.num_requests} requests go {num_laps} times through the trace, and each time "
                f"needs {self._ids_per_lap} hash_ids of its own: more than the {_MAX_ID} that there are"
            )

    @property
    def _ids_per_lap(self) -> int:
        """Hash ids that are set aside for each time through the trace: it finds nothing of the one before."""
        return 1 + max((hash_id for row in self.rows for hash_id in row.hash_ids), default=-1)

    @property
    def shares_prefixes(self) -> bool:
        """Whether any two prompts may begin alike."""
        return any(row.hash_ids for row in self.rows)

    def __iter__(self) -> Iterator[Arrival]:
        """The arrivals, always the same."""
        shapes = self._shapes()
        parts = zip(self._times(), shapes, self._names(), strict=False)
        for number, (time, (prompt, num_output_tokens), tenant) in enumerate(
            islice(parts, self.num_requests)
        ):
            ids = fresh_prompt(number, prompt) if isinstance(prompt, int) else prompt
            yield Arrival(time, ids, num_output_tokens, self.max_tokens or num_output_tokens, tenant)

    def _names(self) -> Iterator[str]:
        names, shares = zip(*self.tenants, strict=True)
        if len(names) == 1:
            yield from repeat(names[0])
        rng = random.Random(f"tenants {self.seed}")  # noqa: S311 - a draw, no secret
        while True:
            yield rng.choices(names, shares)[0]

    def _shapes(self) -> Iterator[tuple[int | TokenIds, int]]:
        if not self.rows:
            rng = random.Random(f"lengths {self.seed}")  # noqa: S311 - a draw, no secret
            prompt, output = lengths(self.prompt), lengths(self.output)
            while True:
                yield prompt(rng), output(rng)
        for lap in count():
            first_id = lap * self._ids_per_lap
            for row in self.rows:
                prompt_of = hashed_prompt(row, first_id=first_id) if row.hash_ids else row.num_prompt_tokens
                yield prompt_of, row.num_output_tokens

    def _times(self) -> Iterator[float]:
        if self.arrivals == "trace":
            stretch = 1.0 if self.rate is None else len(self.rows) / self._span / self.rate
            for lap in range(self.num_requests):
                for row in self.rows:
                    yield stretch * ((row.time or 0.0) + lap * self._span)
            return
        rng = random.Random(f"arrivals {self.seed}")  # noqa: S311 - likewise
        draw = gaps(self.arrivals, self.rate or 1.0)
        time = 0.0
        while True:
            time += draw(rng)
            yield time


def fresh_prompt(number: int, length: int) -> TokenIds:
    """A prompt that shares no block with one of another number."""
    tail = _TAIL[: length - 1] if length <= len(_TAIL) else array("I", range(length - 1))
    return array("I", [number & 0xFFFFFFFF]) + tail


def hashed_prompt(row: Row, tokens_per_id: int = HASHED_TOKENS, *, first_id: int = 0) -> TokenIds:
    """A prompt that begins as another one as far as their hash ids do; each id stands for so many tokens.

    `first_id` is what their counting begins at.
    """
    ids: TokenIds = array("I")
    for hash_id in (first_id + each for each in row.hash_ids):
        ids.extend(range(hash_id * tokens_per_id, (hash_id + 1) * tokens_per_id))
    return ids[: max(1, row.num_prompt_tokens * tokens_per_id // HASHED_TOKENS)]

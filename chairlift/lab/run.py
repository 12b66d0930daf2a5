"""Runs one load under one scheme on given executors, and gives the figures. Pure."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace

from chairlift.lab.loop import Arrival, LogicalLoop, Step
from chairlift.lab.records import quantile
from chairlift.lab.schemes import SCHEMES, WHOLE_PROMPTS
from chairlift.lab.step_times import StepTimes
from rpc import collector
from scheduler.plan import Capacity
from scheduler.policy import Limits

_NO_LIMIT = 1 << 31


@dataclass(frozen=True, slots=True)
class Setup:
    """What a load is served by: so many executors, all alike, under the operator's limits."""

    step_times: StepTimes
    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_seq_len: int = 1 << 20
    num_executors: int = 1
    limits: Limits = field(default_factory=lambda: Limits(window=1))

    @property
    def max_len(self) -> int:
        """Tokens of the longest sequence that can be."""
        return min(self.max_seq_len, self.num_blocks * self.block_size)

    def capacity(self, *, cuts_prompts: bool = True) -> Capacity:
        """What each of the executors can take."""
        return Capacity(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens if cuts_prompts else WHOLE_PROMPTS,
            max_seq_len=self.max_seq_len,
            max_window=self.limits.window,
            vocab_size=_NO_LIMIT,
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run. Times in seconds; NaN where nobody came to that."""

    scheme: str
    requests: int
    refused: int
    output_tokens: int
    seconds: float  # from the first arrival to the last end
    output_tokens_per_second: float
    first_token_mean: float
    first_token_p50: float
    first_token_p99: float
    between_tokens_p50: float
    between_tokens_p99: float
    total_mean: float
    per_output_token_p50: float  # whole time by output tokens
    per_output_token_mean: float
    steps: int
    mean_rows: float  # of a step
    mean_running: float  # sequences holding a seat, by time, while anything was computed
    busy_share: float  # of the executors' time
    kv_held_share: float  # of all KV slots, by time, while anything was computed
    kv_filled_share: float  # tokens for each slot held; what several hold together counts for each
    preemptions: int
    recomputed_share: float  # of the tokens computed
    prefix_hit_share: float  # of the prompt tokens

    def as_json(self) -> dict[str, object]:
        """With None where nobody came to that: JSON has no NaN."""
        return {
            name: None if isinstance(value, float) and value != value else value  # noqa: PLR0124
            for name, value in asdict(self).items()
        }


def configure_collector() -> None:
    """For a process that only simulates: it collects garbage as rarely as the server does."""
    collector.configure()


def simulate(
    setup: Setup,
    load: Iterable[Arrival],
    scheme_name: str = "chairlift",
    *,
    on_step: Callable[[Step], None] | None = None,
) -> Summary:
    """Serves the load to its end."""
    return summary(served(setup, load, scheme_name, on_step=on_step), scheme_name)


def served(
    setup: Setup,
    load: Iterable[Arrival],
    scheme_name: str = "chairlift",
    *,
    on_step: Callable[[Step], None] | None = None,
) -> LogicalLoop:
    """The loop, once the load is at its end."""
    scheme = SCHEMES[scheme_name]
    capacity = setup.capacity(cuts_prompts=scheme.cuts_prompts)
    core = scheme.make(replace(setup.limits))
    loop = LogicalLoop(core, [capacity] * setup.num_executors, setup.step_times, on_step=on_step)
    loop.run(scheme.arrivals(load, longest(setup, scheme_name)))
    return loop


def longest(setup: Setup, scheme_name: str) -> int:
    """Tokens of the longest sequence that can be under this scheme."""
    scheme = SCHEMES[scheme_name]
    if scheme.ranges is None:
        return setup.max_len
    run = scheme.ranges(setup.num_blocks * setup.block_size).longest
    return min(setup.max_len, run // setup.block_size * setup.block_size)


def summary(loop: LogicalLoop, scheme_name: str) -> Summary:
    """The figures of a loop that has come to its end."""
    records, totals = loop.records, loop.totals
    start = records.arrival[0] if len(records) else 0.0
    seconds = loop.now - start
    firsts, per_token = records.first_token_seconds(), records.seconds_per_output_token()
    caches = [state.cache for state in loop.core.executors.values()]
    num_queried = sum(cache.num_query_tokens for cache in caches)
    num_hits = sum(cache.num_hit_tokens for cache in caches)
    blocks = next(iter(loop.core.executors.values())).blocks  # they are all alike
    num_slots = blocks.num_blocks * blocks.block_size
    return Summary(
        scheme=scheme_name,
        requests=len(records),
        refused=records.num_refused,
        output_tokens=totals.num_output_tokens,
        seconds=seconds,
        output_tokens_per_second=_ratio(totals.num_output_tokens, seconds),
        first_token_mean=_mean(firsts),
        first_token_p50=quantile(firsts, 0.5),
        first_token_p99=quantile(firsts, 0.99),
        between_tokens_p50=records.gaps.quantile(0.5),
        between_tokens_p99=records.gaps.quantile(0.99),
        total_mean=_mean(records.total_seconds()),
        per_output_token_p50=quantile(per_token, 0.5),
        per_output_token_mean=_mean(per_token),
        steps=totals.num_steps,
        mean_rows=_ratio(totals.num_rows, totals.num_steps),
        mean_running=_ratio(totals.running_seconds, totals.busy_seconds),
        busy_share=_ratio(totals.busy_seconds, seconds * len(loop.core.executors)),
        kv_held_share=_ratio(totals.held_slot_seconds, totals.busy_seconds * num_slots),
        kv_filled_share=_ratio(totals.filled_slot_seconds, totals.held_slot_seconds),
        preemptions=loop.core.counters.preemptions,
        recomputed_share=_ratio(_recomputed(loop, num_hits), totals.num_computed_tokens),
        prefix_hit_share=_ratio(num_hits, num_queried),
    )


def _recomputed(loop: LogicalLoop, num_hits: int) -> int:
    """Computed beyond what was needed once: prompts but for hits, and all output but each one's last token.

    Padding counts as recomputed: it is computed, and nobody needs it.
    """
    records = loop.records
    needed = -num_hits
    for prompt, output in zip(records.num_prompt_tokens, records.num_output_tokens, strict=True):
        needed += prompt + output - 1 if output else 0
    return max(0, loop.totals.num_computed_tokens - needed)


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else float("nan")


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")

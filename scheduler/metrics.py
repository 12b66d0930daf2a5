"""The scheduler's Prometheus metrics: reads, at each scrape, what the core keeps anyway.

Labels are bounded: configured executors, reasons, outcomes, and at most 20 tenants and "other".
"""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from rpc.metrics import counter, counters, gauge, gauges, histogram
from scheduler.executor_state import ExecutorState
from scheduler.explain import SHARED, Reason
from scheduler.running_scheduler import RunningScheduler
from scheduler.sequence import FinishReason
from scheduler.tenant_series import TenantSeries
from scheduler.waiting import Hold

SUSPECTED = "queued_for_trial"  # executors have died, and it may be the cause
_WAITING_REASONS = (*(reason.value for reason in SHARED), Reason.QUEUED_FOR_PREFIX.value)


class SchedulerMetrics:
    """The source of one scheduler's metrics."""

    def __init__(self, scheduler: RunningScheduler) -> None:
        self._scheduler = scheduler
        self._core = scheduler.core
        self._by_tenant = {
            "input": TenantSeries(lambda tenant: tenant.num_input_tokens),
            "output": TenantSeries(lambda tenant: tenant.num_output_tokens),
        }

    def families(self) -> Iterator[Metric]:
        """All of them."""
        yield from self._now()
        yield from self._blocks()
        yield from self._sequences()
        yield from self._steps()
        yield self._service()

    # --- how it is now ----------------------------------------------------------------------------

    def _now(self) -> Iterator[Metric]:
        core, scheduler = self._core, self._scheduler
        yield gauge("scheduler_serving", "1 when requests are taken, else 0.", float(scheduler.is_serving))
        yield gauge(
            "scheduler_leading",
            "1 when this scheduler leads, 0 on standby.",
            float(not scheduler.standing_by),
        )
        yield gauge("scheduler_term", "Its leadership term.", scheduler.term)
        yield gauge("num_routers", "Routers connected.", scheduler.num_routers)
        yield gauge("num_executors", "Executors attached.", len(core.executors))
        yield gauge(
            "num_requests_running",
            "Sequences in a batch.",
            core.num_running,
        )
        yield gauges(
            "num_requests_waiting",
            "Sequences that wait for a batch, by what keeps them from entering.",
            ("reason",),
            {(reason,): count for reason, count in self.waiting_by_reason().items()},
        )
        yield gauge("num_tokens_waiting", "Known tokens of the sequences that wait.", core.waiting.num_tokens)
        yield gauges(
            "executor_draining",
            "1 while this executor wants to leave.",
            ("executor",),
            {(name,): float(state.is_draining) for name, state in core.executors.items()},
        )

    def waiting_by_reason(self) -> dict[str, int]:
        """How many wait, by reason; the sum is all that wait."""
        core, waiting = self._core, self._core.waiting
        counts = dict.fromkeys((*_WAITING_REASONS, Reason.QUEUED_FOR_TENANT.value, SUSPECTED), 0)
        for holds in waiting.parked.values():
            if Hold.STRANDED in holds:
                counts[Reason.QUEUED_FOR_EXECUTOR.value] += 1
            else:
                counts[SUSPECTED if Hold.SEARCH in holds else Reason.QUEUED_FOR_PREFIX.value] += 1
        num_aside = sum(tenant.num_waiting for tenant in waiting.aside)
        num_aside -= sum(seq.tenant in waiting.aside for seq in waiting.parked)
        counts[Reason.QUEUED_FOR_TENANT.value] = num_aside
        counts[core.clocks.reason.value] += len(waiting) - len(waiting.parked) - num_aside
        return counts

    def _blocks(self) -> Iterator[Metric]:
        executors = self._core.executors
        yield gauges(
            "kv_cache_usage_ratio",
            "Share of the KV blocks that sequences hold.",
            ("executor",),
            {(name,): _num_held(state) / state.blocks.num_blocks for name, state in executors.items()},
        )
        blocks: dict[tuple[str, ...], float] = {}
        for name, state in executors.items():
            blocks[name, "held"] = _num_held(state)
            blocks[name, "cached"] = state.blocks.num_idle
            blocks[name, "free"] = len(state.blocks.free_block_ids)
        yield gauges(
            "kv_blocks",
            "KV blocks: held by sequences; cached, their content may be used again; free.",
            ("executor", "state"),
            blocks,
        )

    # --- since start ------------------------------------------------------------------------------

    def _sequences(self) -> Iterator[Metric]:
        core, told = self._core, self._core.counters
        outcomes: dict[tuple[str, ...], float] = {
            (reason.name.lower(),): float(told.ended[reason]) for reason in FinishReason
        }
        yield counters(
            "sequences",
            "Sequences that ended, by reason, and refused ones.",
            ("reason",),
            {**outcomes, ("refused",): told.refused},
        )
        yield counter(
            "deadline_misses", "Sequences that their deadline ended.", told.ended[FinishReason.DEADLINE]
        )
        yield counters(
            "preemptions",
            "Sequences sent back to wait: blocks ran out, or somebody more important came.",
            ("why",),
            {("blocks",): told.preemptions, ("importance",): told.displacements},
        )
        yield counter(
            "recoveries", "Sequences that lost their executor and were computed again.", told.recoveries
        )
        yield counters(
            "executors_lost",
            "Executors that went: crashed (killed, hung, out of reach, lying), or left on purpose.",
            ("why",),
            {("crash",): told.executors_crashed, ("left",): told.executors_left},
        )
        yield counter("audits_failed", "Times that blocks and holders disagreed.", told.audits_failed)
        yield counter("wasted_tokens", "Tokens sampled for sequences that were over.", told.wasted_tokens)
        caches = [state.cache for state in core.executors.values()]
        yield counter(
            "prefix_cache_queries",
            "Prompt tokens looked for in the cache.",
            told.prefix_query_tokens + sum(cache.num_query_tokens for cache in caches),
        )
        yield counter(
            "prefix_cache_hits",
            "Prompt tokens found there.",
            told.prefix_hit_tokens + sum(cache.num_hit_tokens for cache in caches),
        )
        yield histogram(
            "request_queue_time_seconds", "From arrival to the first admission.", core.meters.queue_seconds
        )
        yield histogram(
            "cancel_to_free_steps",
            "Steps on their way when a running sequence was given up; the next one is without it.",
            core.meters.steps_to_free,
        )

    def _steps(self) -> Iterator[Metric]:
        meters, told = self._core.meters, self._core.counters
        yield counter("steps", "Steps that answered.", told.steps)
        yield counter("scheduled_tokens", "Tokens that plans gave out.", told.scheduled_tokens)
        yield counter("spec_decode_draft_tokens", "Guessed tokens that plans gave out.", told.draft_tokens)
        yield counter(
            "spec_decode_accepted_tokens", "Guessed tokens that were right.", told.draft_tokens_accepted
        )
        yield histogram("step_time_seconds", "What executors took for a step.", meters.step_us, 1e-6)
        yield histogram(
            "executor_idle_gap_seconds", "How long the executor was idle before a step.", meters.idle_us, 1e-6
        )
        yield histogram("batch_size", "Sequences in a step.", meters.rows)
        yield counter(
            "step_wall_seconds", "Steps as the scheduler sees them, the wire included.", meters.wall_seconds
        )
        yield counter(
            "step_overhead_seconds",
            "Of step_wall_seconds, what no executor computed: RPC and planning that came too late.",
            meters.overhead_seconds,
        )
        yield counter("plans_sent", "Plans sent to executors.", self._scheduler.num_plans)
        yield counter("plan_bytes", "Their size on the wire.", self._scheduler.num_plan_bytes)

    def _service(self) -> Metric:
        tenants = self._core.tenants
        values: dict[tuple[str, ...], float] = {}
        for kind, series in self._by_tenant.items():
            total = tenants.num_input_tokens if kind == "input" else tenants.num_output_tokens
            for name, count in series.read(tenants, total, tenants.configured).items():
                values[name, kind] = count
        return counters(
            "tenant_service_tokens",
            "Tokens that tenants were served: prompt tokens computed, output tokens won.",
            ("tenant", "kind"),
            values,
        )


def _num_held(state: ExecutorState) -> int:
    return state.blocks.num_blocks - state.blocks.num_free

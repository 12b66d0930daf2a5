"""A router's metrics for Prometheus. Reads what other modules keep anyway; counts nothing itself.

Text of clients never becomes a label: no model name, path, tenant or request id is among them.
"""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from router.intake import Intake
from router.scheduler_pool import SchedulerPool
from rpc.metrics import counter, counters, gauge, gauges, histogram


class RouterMetrics:
    """The source of one router."""

    def __init__(self, intake: Intake, schedulers: SchedulerPool) -> None:
        self._intake = intake
        self._schedulers = schedulers

    def families(self) -> Iterator[Metric]:
        """All of them."""
        yield from self._requests()
        yield from self._tokens()
        yield gauge(
            "router_serving", "1 when requests are taken, else 0.", float(self._intake.refusal is None)
        )
        yield gauges(
            "router_scheduler_serving",
            "1 when this scheduler takes requests of this router, else 0.",
            ("scheduler",),
            {(str(client.address),): float(client.refusal is None) for client in self._schedulers.clients},
        )

    def _requests(self) -> Iterator[Metric]:
        tally = self._intake.tally
        yield gauge(
            "router_requests_open",
            "Requests under way at this router, waiting and running alike.",
            self._intake.num_live,
        )
        yield counter("requests_received", "Requests that came in.", tally.num_received)
        yield counters(
            "requests",
            "Requests that left, by outcome: with those open they are all that came in.",
            ("outcome",),
            {(outcome.value,): count for outcome, count in tally.num_by_outcome.items()},
        )
        yield histogram(
            "e2e_request_latency_seconds", "From arrival to end, of requests that went well.", tally.seconds
        )
        yield histogram(
            "request_prompt_tokens", "Prompt length of requests that went well.", tally.prompt_tokens
        )
        yield histogram(
            "request_generation_tokens", "Output length of choices that went well.", tally.output_tokens
        )

    def _tokens(self) -> Iterator[Metric]:
        tally, latencies = self._intake.tally, self._intake.latencies
        yield counter(
            "prompt_tokens", "Prompt tokens of accepted requests that left.", tally.num_prompt_tokens
        )
        yield counter(
            "prompt_tokens_cached", "Of them, those that were found computed.", tally.num_cached_tokens
        )
        yield counter("generation_tokens", "Output tokens taken in for clients.", latencies.num_tokens)
        yield counter(
            "router_wasted_tokens",
            "Output tokens that came behind a stop string, and no client got.",
            latencies.num_wasted_tokens,
        )
        yield histogram(
            "time_to_first_token_seconds",
            "From arrival to the first token of a choice.",
            latencies.time_to_first_token,
        )
        yield histogram(
            "inter_token_latency_seconds",
            "Between one token of a choice and the next.",
            latencies.inter_token,
        )

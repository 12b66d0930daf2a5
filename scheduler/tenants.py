"""Tenants: what each may use, what each has used, and whose turn it is.

Service is counted in virtual tokens, as in "Fairness in Serving Large Language Models" (VTC, OSDI'24): prompt
tokens computed and output tokens won, weighted, divided by the tenant's weight. Recomputing is never charged.
A tenant that comes back from idleness is lifted to the least served of those who have work, so that idle time
is not banked; nobody is ever held back while a seat is empty (work-conserving).

Pure: time comes in as an argument.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

INPUT_WEIGHT = 1.0  # virtual tokens for a prompt token computed
OUTPUT_WEIGHT = 2.0  # for an output token


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What one tenant may use. None is no limit."""

    weight: float = 1.0  # share of service under the fair policy
    max_running: int | None = None  # sequences in a batch
    max_blocks: int | None = None  # KV blocks held
    max_queued: int | None = None  # waiting requests
    max_queued_tokens: int | None = None  # prompt and output tokens of waiting requests
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None  # prompt tokens and max_tokens of accepted requests

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}: it must be more than 0")


@dataclass(slots=True)
class RateLimiter:
    """A bucket that fills at `per_minute` and holds one minute's worth. Time in seconds."""

    per_minute: float
    level: float = 0.0
    updated: float | None = None

    def seconds_until(self, amount: float, now: float) -> float:
        """How long until `amount` may be taken; more than a minute's worth waits for a full bucket."""
        self._fill(now)
        missing = min(amount, self.per_minute) - self.level
        return max(0.0, missing * 60.0 / self.per_minute)

    def take(self, amount: float, now: float) -> None:
        """Takes `amount`; an accepted request that comes again may leave a debt."""
        self._fill(now)
        self.level -= amount

    def is_full(self, now: float) -> bool:
        """Whether nothing of what was taken is remembered any more."""
        self._fill(now)
        return self.level >= self.per_minute

    def _fill(self, now: float) -> None:
        if self.updated is None:
            self.level = self.per_minute
        else:
            self.level = min(self.per_minute, self.level + (now - self.updated) * self.per_minute / 60.0)
        self.updated = now


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant's limits and use."""

    name: str
    limits: TenantLimits
    num_running: int = 0
    num_blocks: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_input_tokens: int = 0  # charged: computed at a first admission
    num_output_tokens: int = 0  # charged: won
    lifted: float = 0.0  # virtual tokens credited against others when it came back from idleness
    block_seconds: float = 0.0  # KV blocks held, summed over time
    _metered_at: float = 0.0
    requests: RateLimiter | None = field(init=False)
    tokens: RateLimiter | None = field(init=False)

    def __post_init__(self) -> None:
        limits = self.limits
        self.requests = (limits.requests_per_minute and RateLimiter(limits.requests_per_minute)) or None
        self.tokens = (limits.tokens_per_minute and RateLimiter(limits.tokens_per_minute)) or None

    @property
    def service(self) -> float:
        """Virtual tokens received for each unit of weight."""
        received = INPUT_WEIGHT * self.num_input_tokens + OUTPUT_WEIGHT * self.num_output_tokens
        return received / self.limits.weight + self.lifted

    @property
    def has_work(self) -> bool:
        """Whether anything of it runs or waits."""
        return bool(self.num_running or self.num_waiting)

    def draw_on_rates(self, num_tokens: int, now: float) -> None:
        """A request of so many tokens, prompt and `max_tokens`, was taken in."""
        if self.requests is not None:
            self.requests.take(1, now)
        if self.tokens is not None:
            self.tokens.take(num_tokens, now)

    @property
    def may_run_one_more(self) -> bool:
        """Whether its own seat limit lets one more sequence enter."""
        return self.limits.max_running is None or self.num_running < self.limits.max_running

    def may_hold(self, num_blocks: int) -> bool:
        """Whether its own block limit lets one more sequence hold so many; a first one may always."""
        limit = self.limits.max_blocks
        return limit is None or self.num_running == 0 or self.num_blocks + num_blocks <= limit

    @property
    def may_grow(self) -> bool:
        """Whether its own block limit lets a sequence take a further block; a lone one may always."""
        limit = self.limits.max_blocks
        return limit is None or self.num_running == 1 or self.num_blocks < limit

    def is_as_new(self, floor: float, now: float) -> bool:
        """Whether a new one that starts at the service `floor` would be no better off."""
        return (
            not self.has_work
            and self.service <= floor
            and all(limiter is None or limiter.is_full(now) for limiter in (self.requests, self.tokens))
        )

    def meter(self, num_blocks: int, now: float) -> None:
        """It holds `num_blocks` more (or, negative, less) from now on."""
        self.block_seconds += self.num_blocks * (now - self._metered_at)
        self._metered_at = now
        self.num_blocks += num_blocks


class Tenants:
    """All tenants seen so far.

    Ones that nobody configured are dropped when they grow too many, but only those that are as good as new:
    nobody gains by being forgotten. So a minute's names are kept in any case.
    """

    __slots__ = (
        "_by_name",
        "_by_service",
        "_configured",
        "_default",
        "_drop_above",
        "_dropped_input",
        "_dropped_output",
        "_last_service",
        "_listed",
        "dropped_block_seconds",
    )

    MAX_UNKNOWN = 10_000

    def __init__(
        self, configured: dict[str, TenantLimits] | None = None, default: TenantLimits | None = None
    ) -> None:
        self._configured = configured or {}
        self._default = default or TenantLimits()
        self._by_name: dict[str, Tenant] = {}
        self._dropped_input = self._dropped_output = 0  # tokens of tenants that were dropped
        self._last_service = 0.0  # of who had work last: where the next one starts when all were idle
        self._by_service: list[tuple[float, str, Tenant]] = []  # who has work; the service was so or is more
        self._listed: set[Tenant] = set()  # there
        self._drop_above = self.MAX_UNKNOWN + len(self._configured)
        self.dropped_block_seconds = 0.0  # metered for tenants that were dropped since

    def get(self, name: str, now: float) -> Tenant:
        """The tenant of that name."""
        tenant = self._by_name.get(name)
        if tenant is None:
            if len(self._by_name) > self._drop_above:
                self._drop_idle(now)
            tenant = Tenant(name, self._configured.get(name, self._default))
            tenant.lifted = self._floor()
            self._by_name[name] = tenant
        return tenant

    def arrived(self, tenant: Tenant) -> None:
        """A request of `tenant` is about to wait: if it was idle, its idle time is not banked."""
        if not tenant.has_work:
            tenant.lifted += max(0.0, self._floor() - tenant.service)
        if tenant not in self._listed:
            self._listed.add(tenant)
            heapq.heappush(self._by_service, (tenant.service, tenant.name, tenant))

    def left(self, tenant: Tenant) -> None:
        """Something of `tenant` has ended."""
        if not tenant.has_work:
            self._last_service = max(self._last_service, tenant.service)

    def _floor(self) -> float:
        """Service of the least served tenant with work; of the last one that had any when all are idle."""
        by_service = self._by_service
        while by_service:
            service, name, tenant = by_service[0]
            if not tenant.has_work:
                heapq.heappop(by_service)
                self._listed.remove(tenant)
            elif tenant.service > service:  # it only grows: put right when it comes up
                heapq.heapreplace(by_service, (tenant.service, name, tenant))
            else:
                return service
        return self._last_service

    @property
    def configured(self) -> frozenset[str]:
        """Names that have limits of their own."""
        return frozenset(self._configured)

    @property
    def num_input_tokens(self) -> int:
        """Of all tenants ever."""
        return self._dropped_input + sum(item.num_input_tokens for item in self._by_name.values())

    @property
    def num_output_tokens(self) -> int:
        """Of all tenants ever."""
        return self._dropped_output + sum(item.num_output_tokens for item in self._by_name.values())

    def _drop_idle(self, now: float) -> None:
        floor = self._floor()
        dropped = [
            item
            for name, item in self._by_name.items()
            if name not in self._configured and item.is_as_new(floor, now)
        ]
        for tenant in dropped:
            del self._by_name[tenant.name]
            self.dropped_block_seconds += tenant.block_seconds
            self._dropped_input += tenant.num_input_tokens
            self._dropped_output += tenant.num_output_tokens
        self._by_service = [item for item in self._by_service if item[2].has_work]
        heapq.heapify(self._by_service)
        self._listed = {tenant for _, _, tenant in self._by_service}
        # Where hardly any can go, nothing is gained by looking again at the next name.
        self._drop_above = max(self.MAX_UNKNOWN + len(self._configured), 2 * len(self._by_name))

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._by_name.values())

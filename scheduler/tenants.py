"""Tenants: what each may use, what each has used, and whose turn it is.

Service is counted in virtual tokens, as in "Fairness in Serving Large Language Models" (VTC, OSDI'24): prompt
tokens computed and output tokens produced, weighted, divided by the tenant's weight. Recomputing is never
charged. Each importance class is a contest of its own. A tenant competes in it while it has something waiting
there and is at no limit of its own; when it begins to compete, it is lifted to the least served competitor.
So what a tenant does not use is not saved up, whether it was idle, asked for less than its share, or was held
at its limit; and no tenant is held back while a seat is empty (work-conserving).

Pure: time comes in as an argument.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from scheduler.explain import AsideClock

INPUT_WEIGHT = 1.0  # virtual tokens per prompt token computed
OUTPUT_WEIGHT = 2.0  # per output token
_REMEMBERED_SECONDS = 60.0
_ROUNDING_SECONDS = 3e-8  # of times up to a few years
_TOLERATED_STALE = 64  # this many stale entries are not worth sweeping


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What one tenant may use. None means no limit."""

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
    """A bucket that fills at `per_minute` and holds one minute's worth. Times in seconds."""

    per_minute: float
    level: float = 0.0
    updated: float | None = None

    def seconds_until(self, amount: float, now: float) -> float:
        """How long until `amount` may be taken; more than a minute's worth waits for a full bucket."""
        self._fill(now)
        missing = min(amount, self.per_minute) - self.level
        seconds = missing * 60.0 / self.per_minute
        # A client that returns after exactly the time it was told is let in, however times are rounded.
        return seconds if seconds > _ROUNDING_SECONDS else 0.0

    def take(self, amount: float, now: float) -> None:
        """Takes `amount`; an accepted request that is submitted again may leave a debt."""
        self._fill(now)
        self.level -= amount

    def is_full(self, now: float) -> bool:
        """Whether nothing that was taken is remembered any more."""
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
    num_output_tokens: int = 0  # charged: produced
    # Virtual tokens for the times when it did not compete.
    lifted: dict["Contest", float] = field(default_factory=dict)
    block_seconds: float = 0.0  # KV blocks held, integrated over time
    _metered_at: float = 0.0
    requests: RateLimiter | None = field(init=False)
    tokens: RateLimiter | None = field(init=False)
    aside: AsideClock = field(init=False)  # runs while it is passed over because of a limit of its own

    def __post_init__(self) -> None:
        limits = self.limits
        self.aside = AsideClock(f"tenant {self.name!r} is at its own limit")
        self.requests = (limits.requests_per_minute and RateLimiter(limits.requests_per_minute)) or None
        self.tokens = (limits.tokens_per_minute and RateLimiter(limits.tokens_per_minute)) or None

    @property
    def service(self) -> float:
        """Virtual tokens received per unit of weight."""
        received = INPUT_WEIGHT * self.num_input_tokens + OUTPUT_WEIGHT * self.num_output_tokens
        return received / self.limits.weight

    def service_in(self, contest: "Contest") -> float:
        """The same plus its lifts in that contest: the tenant with the least is next."""
        return self.service + self.lifted.get(contest, 0.0)

    @property
    def has_work(self) -> bool:
        """Whether any of its sequences run or wait."""
        return bool(self.num_running or self.num_waiting)

    def draw_on_rates(self, num_tokens: int, now: float) -> None:
        """Charges the rate limits for an accepted request of this many tokens, prompt plus `max_tokens`."""
        if self.requests is not None:
            self.requests.take(1, now)
        if self.tokens is not None:
            self.tokens.take(num_tokens, now)

    @property
    def may_run_one_more(self) -> bool:
        """Whether its own seat limit lets one more sequence enter."""
        return self.limits.max_running is None or self.num_running < self.limits.max_running

    def may_hold(self, num_blocks: int) -> bool:
        """Whether its own block limit lets one more sequence hold this many; its only one always may."""
        limit = self.limits.max_blocks
        return limit is None or self.num_running == 0 or self.num_blocks + num_blocks <= limit

    @property
    def may_grow(self) -> bool:
        """Whether its own block limit lets a sequence take another block; a lone one always may."""
        limit = self.limits.max_blocks
        return limit is None or self.num_running == 1 or self.num_blocks < limit

    def is_as_new(self, now: float) -> bool:
        """Whether a new tenant in its place would be no better off; service is remembered for a minute."""
        idle_seconds = now - self._metered_at
        return (
            not self.has_work
            and (
                idle_seconds >= _REMEMBERED_SECONDS
                or all(self.service_in(contest) <= contest.floor for contest in self.lifted)
            )
            and all(limiter is None or limiter.is_full(now) for limiter in (self.requests, self.tokens))
        )

    def meter(self, num_blocks: int, now: float) -> None:
        """It holds `num_blocks` more (or, if negative, fewer) from now on."""
        self.block_seconds += self.num_blocks * (now - self._metered_at)
        self._metered_at = now
        self.num_blocks += num_blocks


class Contest:
    """The tenants that compete for turns in one importance class, and the service at which a new one begins.

    The floor is the service of the least served competitor or, while there is none, of the last one there
    was. It never falls. A tenant that begins to compete is lifted to it; the first time it begins exactly
    there, whatever service it received in other classes.
    """

    __slots__ = ("_by_service", "_competing", "_last", "_listed", "_numbers")

    def __init__(self) -> None:
        self._competing: set[Tenant] = set()
        self._last: Tenant | None = None  # the last one that ceased to compete
        self._by_service: list[tuple[float, int, Tenant]] = []  # lower bounds of service
        self._listed: set[Tenant] = set()  # tenants in there: all that compete, and some that ceased to
        self._numbers = count()

    def enter(self, tenant: Tenant) -> None:
        """`tenant` competes from now on."""
        if tenant in self._competing:
            return
        missing = self.floor - tenant.service_in(self)
        if missing > 0 or self not in tenant.lifted:
            tenant.lifted[self] = tenant.lifted.get(self, 0.0) + missing
        self._competing.add(tenant)
        if tenant not in self._listed:
            self._list(tenant)

    def leave(self, tenant: Tenant) -> None:
        """`tenant` no longer competes: nothing of it waits here, or it is at a limit of its own."""
        if tenant in self._competing:
            self._competing.remove(tenant)
            self._last = tenant

    @property
    def floor(self) -> float:
        """The service at which the next one begins."""
        by_service = self._by_service
        while by_service:
            service, number, tenant = by_service[0]
            if tenant not in self._competing:
                heapq.heappop(by_service)
                self._listed.remove(tenant)
            elif tenant.service_in(self) > service:  # service only grows: corrected when it comes to the top
                heapq.heapreplace(by_service, (tenant.service_in(self), number, tenant))
            else:
                return service
        return 0.0 if self._last is None else self._last.service_in(self)

    def _list(self, tenant: Tenant) -> None:
        self._listed.add(tenant)
        heapq.heappush(self._by_service, (tenant.service_in(self), next(self._numbers), tenant))
        if len(self._by_service) > _TOLERATED_STALE + 2 * len(self._competing):
            self._by_service = [item for item in self._by_service if item[2] in self._competing]
            heapq.heapify(self._by_service)
            self._listed = set(self._competing)


class Tenants:
    """All tenants seen so far.

    Tenants without configured limits are dropped when there are too many, but only those that are as good as
    new: none gains by being forgotten. So what is kept above the limit are names of about the last minute.
    """

    __slots__ = (
        "_by_name",
        "_configured",
        "_default",
        "_drop_above",
        "_dropped_input",
        "_dropped_output",
        "dropped_block_seconds",
    )

    MAX_UNKNOWN = 10_000

    def __init__(
        self, configured: dict[str, TenantLimits] | None = None, default: TenantLimits | None = None
    ) -> None:
        self._configured = configured or {}
        self._default = default or TenantLimits()
        self._by_name: dict[str, Tenant] = {}
        self._dropped_input = self._dropped_output = 0  # tokens of dropped tenants
        self._drop_above = self.MAX_UNKNOWN + len(self._configured)
        self.dropped_block_seconds = 0.0  # metered for dropped tenants

    def get(self, name: str, now: float) -> Tenant:
        """The tenant of that name, made if it is new."""
        tenant = self._by_name.get(name)
        if tenant is None:
            if len(self._by_name) > self._drop_above:
                self._drop_idle(now)
            tenant = Tenant(name, self._configured.get(name, self._default))
            self._by_name[name] = tenant
        return tenant

    @property
    def configured(self) -> frozenset[str]:
        """Names that have limits of their own."""
        return frozenset(self._configured)

    @property
    def num_input_tokens(self) -> int:
        """Prompt tokens charged to all tenants ever."""
        return self._dropped_input + sum(item.num_input_tokens for item in self._by_name.values())

    @property
    def num_output_tokens(self) -> int:
        """Output tokens charged to all tenants ever."""
        return self._dropped_output + sum(item.num_output_tokens for item in self._by_name.values())

    def _drop_idle(self, now: float) -> None:
        dropped = [
            item
            for name, item in self._by_name.items()
            if name not in self._configured and item.is_as_new(now)
        ]
        for tenant in dropped:
            del self._by_name[tenant.name]
            self.dropped_block_seconds += tenant.block_seconds
            self._dropped_input += tenant.num_input_tokens
            self._dropped_output += tenant.num_output_tokens
        # If hardly any can go, looking again at the next name would gain nothing.
        self._drop_above = max(self.MAX_UNKNOWN + len(self._configured), 2 * len(self._by_name))

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._by_name.values())

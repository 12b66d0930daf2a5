"""Tenants: what each may use, what each has used, and whose turn it is.

Service is counted in virtual tokens, as in "Fairness in Serving Large Language Models" (VTC, OSDI'24): prompt
tokens computed and output tokens won, weighted, divided by the tenant's weight. Recomputing is never charged.
A tenant that comes back from idleness is lifted to the least served of those who have work, so that idle time
is not banked; nobody is ever held back while a seat is empty (work-conserving).

Pure: time comes in as an argument.
"""

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

    @property
    def may_run_one_more(self) -> bool:
        """Whether its own seat limit lets one more sequence enter."""
        return self.limits.max_running is None or self.num_running < self.limits.max_running

    def may_hold(self, num_blocks: int) -> bool:
        """Whether its own block limit lets it hold so many more; a first sequence may always."""
        limit = self.limits.max_blocks
        return limit is None or self.num_running == 0 or self.num_blocks + num_blocks <= limit

    def meter(self, num_blocks: int, now: float) -> None:
        """It holds `num_blocks` more (or, negative, less) from now on."""
        self.block_seconds += self.num_blocks * (now - self._metered_at)
        self._metered_at = now
        self.num_blocks += num_blocks


class Tenants:
    """All tenants seen so far. Idle ones that nobody configured are dropped when they grow too many."""

    __slots__ = ("_by_name", "_configured", "_default", "_dropped_input", "_dropped_output", "_last_service")

    MAX_UNKNOWN = 10_000

    def __init__(
        self, configured: dict[str, TenantLimits] | None = None, default: TenantLimits | None = None
    ) -> None:
        self._configured = configured or {}
        self._default = default or TenantLimits()
        self._by_name: dict[str, Tenant] = {}
        self._dropped_input = self._dropped_output = 0  # tokens of tenants that were dropped
        self._last_service = 0.0  # of who had work last: where the next one starts when all were idle

    def get(self, name: str) -> Tenant:
        """The tenant of that name."""
        tenant = self._by_name.get(name)
        if tenant is None:
            if len(self._by_name) > self.MAX_UNKNOWN + len(self._configured):
                self._drop_idle()
            tenant = Tenant(name, self._configured.get(name, self._default))
            tenant.lifted = self._floor()
            self._by_name[name] = tenant
        return tenant

    def arrived(self, tenant: Tenant) -> None:
        """A request of `tenant` is about to wait: if it was idle, its idle time is not banked."""
        if not tenant.has_work:
            tenant.lifted += max(0.0, self._floor() - tenant.service)

    def left(self, tenant: Tenant) -> None:
        """Something of `tenant` has ended."""
        if not tenant.has_work:
            self._last_service = max(self._last_service, tenant.service)

    def _floor(self) -> float:
        """Service of the least served tenant with work; of the last one that had any when all are idle."""
        return min(
            (item.service for item in self._by_name.values() if item.has_work), default=self._last_service
        )

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

    def _drop_idle(self) -> None:
        kept = {}
        for name, item in self._by_name.items():
            if item.has_work or name in self._configured:
                kept[name] = item
            else:
                self._dropped_input += item.num_input_tokens
                self._dropped_output += item.num_output_tokens
        self._by_name = kept

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._by_name.values())

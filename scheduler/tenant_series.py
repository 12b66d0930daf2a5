"""Chooses which tenants have a name in the metrics: a fixed number of the most served; the rest is "other".

A name once given stays: names that came and went with every change of rank would create new series for ever.
So tenants in the tenants' file come first, then those that were served most when there was room. What a
tenant was served before it had a name may stay in "other", since no count ever decreases. Pure.
"""

from collections.abc import Callable, Iterable
from typing import Final

from scheduler.tenants import Tenant

MAX_NAMED: Final = 20
OTHER: Final = "other"


class TenantSeries:
    """One count by tenant, such as output tokens."""

    def __init__(self, count_of: Callable[[Tenant], int]) -> None:
        self._count_of = count_of
        self._named: dict[str, int] = {}
        self._seen: dict[str, tuple[Tenant, int]] = {}
        self._total = 0
        self._other = 0

    def read(self, tenants: Iterable[Tenant], total: int, first: frozenset[str]) -> dict[str, int]:
        """Counts by name. `total` is that of all tenants ever; names in `first` come before others."""
        left = total - self._total
        self._total = total
        unnamed = []
        for tenant in tenants:
            if tenant.name not in self._named:
                unnamed.append(tenant)
                continue
            count = self._count_of(tenant)
            same, before = self._seen[tenant.name]
            grown = count - (before if same is tenant else 0)
            self._seen[tenant.name] = tenant, count
            self._named[tenant.name] += grown
            left -= grown
        if unnamed and len(self._named) < MAX_NAMED:
            left -= self._name(unnamed, first, left)
        self._other += left
        return {**self._named, OTHER: self._other}

    def _name(self, unnamed: list[Tenant], first: frozenset[str], left: int) -> int:
        """Gives names to as many as there is room for; returns how much of `left` is theirs."""
        unnamed = [tenant for tenant in unnamed if self._count_of(tenant) and tenant.name not in {"", OTHER}]
        unnamed.sort(key=lambda tenant: (tenant.name not in first, -self._count_of(tenant), tenant.name))
        given = 0
        for tenant in unnamed[: MAX_NAMED - len(self._named)]:
            count = self._count_of(tenant)
            self._named[tenant.name] = min(count, left - given)
            self._seen[tenant.name] = tenant, count
            given += self._named[tenant.name]
        return given

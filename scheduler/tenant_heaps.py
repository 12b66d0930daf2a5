"""Sequences in one order, tenant by tenant: the first of all, while tenants are left out or change places.

A heap for each tenant, and a heap of the tenants by their first sequences. Entries are never removed from the
midst of a heap: whoever put them there says which ones are still valid, and a stale one is dropped when it
reaches the top, or when there are more stale ones than valid ones. Pure.
"""

import heapq
from collections.abc import Callable, Collection, Mapping

from scheduler.sequence import Sequence
from scheduler.tenants import Tenant

Key = tuple[float, ...]


class TenantHeaps:
    """The heaps of one order."""

    __slots__ = (
        "_aside",
        "_entry_of",
        "_heaps",
        "_newest_offer",
        "_num_entries",
        "_num_offers",
        "_offers",
        "_rank",
    )

    def __init__(
        self,
        entry_of: Mapping[Sequence, int],
        aside: Collection[Tenant],
        rank: Callable[[Tenant, Key], Key],
    ) -> None:
        """`entry_of`: the valid entry of each sequence; any other is stale.

        `aside`: tenants that are left out. `rank`: orders tenants, given the key of each one's first
        sequence.
        """
        self._entry_of = entry_of
        self._aside = aside
        self._rank = rank
        self._heaps: dict[Tenant, list[tuple[Key, int, Sequence]]] = {}
        self._num_entries = 0  # in those heaps, at most: stale ones included
        self._offers: list[tuple[Key, int, Tenant]] = []
        self._newest_offer: dict[Tenant, int] = {}  # the valid one in `_offers`
        self._num_offers = 0

    def __bool__(self) -> bool:
        return bool(self._heaps)

    def push(self, key: Key, entry: int, seq: Sequence, num_valid: int) -> None:
        """Adds `seq` under an entry that is valid from now on, as `num_valid` are, this one included."""
        heap = self._heaps.setdefault(seq.tenant, [])
        heapq.heappush(heap, (key, entry, seq))
        self._num_entries += 1
        if heap[0][2] is seq:
            self._offer(seq.tenant)
        if self._num_entries > 2 * num_valid:
            self._sweep()

    def first(self) -> Sequence | None:
        """The first of all. Ranks get worse as tenants are served, so a stale one on top is pushed down."""
        offers = self._offers
        while offers:
            rank, offer, tenant = offers[0]
            if self._newest_offer.get(tenant) != offer or tenant in self._aside:
                heapq.heappop(offers)
                continue
            heap = self._heaps[tenant]
            while heap and self._entry_of.get(heap[0][2]) != heap[0][1]:
                heapq.heappop(heap)
            if heap and self._rank(tenant, heap[0][0]) == rank:
                return heap[0][2]
            heapq.heappop(offers)
            if heap:
                self._offer(tenant)
            else:
                del self._heaps[tenant], self._newest_offer[tenant]
        return None

    @property
    def best_rank(self) -> Key:
        """The rank of `first`, which must just have been called and not have returned None."""
        return self._offers[0][0]

    def recall(self, tenant: Tenant) -> None:
        """`tenant` is no longer left out."""
        if tenant in self._heaps:
            self._offer(tenant)

    def _offer(self, tenant: Tenant) -> None:
        self._num_offers += 1
        self._newest_offer[tenant] = self._num_offers
        heapq.heappush(
            self._offers, (self._rank(tenant, self._heaps[tenant][0][0]), self._num_offers, tenant)
        )
        if len(self._offers) > 2 * len(self._heaps):
            self._offers[:] = [
                offer for offer in self._offers if self._newest_offer.get(offer[2]) == offer[1]
            ]
            heapq.heapify(self._offers)

    def _sweep(self) -> None:
        """Drops stale entries, and tenants without waiting sequences."""
        for tenant, heap in list(self._heaps.items()):
            heap[:] = [item for item in heap if self._entry_of.get(item[2]) == item[1]]
            heapq.heapify(heap)
            if not heap:
                del self._heaps[tenant], self._newest_offer[tenant]
        self._num_entries = sum(map(len, self._heaps.values()))

"""All schedulers that a router knows: shards, each with executors of its own, and each shard's standbys.

A shard is led by the one member that serves; of two that say so, by the one of the higher term. What runs at
another member, because it is gone or was deposed, goes on at the leader at once. What runs in a shard without
a leader waits for it, and goes on in another shard once the whole shard is lost (`SchedulerClient.is_lost`).

It must not know: streams, messages to and from schedulers, what is asked.
"""

import asyncio
import contextlib
import hashlib
from collections import abc
from typing import Final, TypeVar

import grpc
import structlog

from router.request_log import End, RequestLog
from router.scheduler_client import SchedulerClient
from router.scheduler_session import Welcome
from rpc.errors import RequestError

# Requests without a tenant are placed by this many ids of their prompt: more than the system prompt that all
# of them may begin with, so that it alone does not send everybody to one shard.
PLACING_TOKENS: Final = 256

_log = structlog.get_logger()
_T = TypeVar("_T")


def placing_name(tenant: str, prompt_token_ids: tuple[int, ...]) -> str:
    """What decides where a request goes: its tenant, so that limits hold in one place; else its beginning.

    Requests that begin alike share cached blocks, which they find only where the others have been.
    """
    return tenant or repr(prompt_token_ids[:PLACING_TOKENS])


class Shard:
    """A scheduler and its standbys."""

    def __init__(self, name: str, members: list[SchedulerClient]) -> None:
        self.name = name
        self.members = members

    @property
    def leader(self) -> SchedulerClient | None:
        """The member that takes requests; None when none does."""
        serving = [member for member in self.members if member.refusal is None]
        # Whoever has requests stays at equal terms: there is nothing to choose between them.
        return max(serving, key=lambda member: (member.term, member.num_live > 0), default=None)

    @property
    def refusal(self) -> str | None:
        """Why no new request is taken here, as a sentence; None when one is."""
        if self.leader is not None:
            return None
        return "; ".join(member.refusal for member in self.members if member.refusal)

    @property
    def is_lost(self) -> bool:
        """Whether nobody here need be waited for."""
        return all(member.is_lost for member in self.members)


class SchedulerPool:
    """Places requests among shards, and moves them when a scheduler is lost."""

    def __init__(self, clients: list[SchedulerClient]) -> None:
        """`clients` has at least one; those of one shard bear its name."""
        self._clients = clients
        members: dict[str, list[SchedulerClient]] = {}
        for client in clients:
            client.on_changed = self._settle
            members.setdefault(client.shard, []).append(client)
        self._shards = [Shard(name, clients_of_it) for name, clients_of_it in members.items()]
        self._client_of: dict[RequestLog, SchedulerClient] = {}

    @property
    def refusal(self) -> str | None:
        """Why no new request can be taken, as a sentence; None when one can."""
        refusals = [shard.refusal for shard in self._shards]
        return None if None in refusals else "; ".join(refusal for refusal in refusals if refusal)

    @property
    def leaders(self) -> list[SchedulerClient]:
        """Those that take requests, one for each shard that serves."""
        return [leader for shard in self._shards if (leader := shard.leader) is not None]

    @property
    def clients(self) -> tuple[SchedulerClient, ...]:
        """All of them, serving or not."""
        return tuple(self._clients)

    def place(self, name: str) -> SchedulerClient:
        """The scheduler for this name (`placing_name`), among those that take requests.

        Rendezvous hashing: a shard that leaves or comes back moves its own names alone. Raises RequestError,
        UNAVAILABLE, when none takes requests.
        """
        self.check_serving()
        return max(
            self.leaders, key=lambda leader: hashlib.sha256(f"{leader.shard}\0{name}".encode()).digest()
        )

    def welcome(self) -> Welcome:
        """What the scheduler with the most room has told of the model.

        Raises RequestError, UNAVAILABLE, before any has.
        """
        welcomes = [client.welcome for client in self.leaders or self._clients if client.welcome is not None]
        if not welcomes:
            raise self._nobody()
        return max(welcomes, key=lambda welcome: welcome.max_total_tokens)

    def check_serving(self) -> None:
        """Raises RequestError, UNAVAILABLE, when no scheduler takes requests."""
        if not self.leaders:
            raise self._nobody()

    async def first_answer(self, ask: abc.Callable[[SchedulerClient], abc.Awaitable[_T]]) -> _T:
        """What the first shard that can says. Raises RequestError, the last one's, when none can."""
        self.check_serving()
        *others, last = self.leaders
        for scheduler in others:
            with contextlib.suppress(RequestError):  # it knows nothing of it, or cannot say
                return await ask(scheduler)
        return await ask(last)

    async def run(self) -> None:
        """Holds all streams until cancelled."""
        async with asyncio.TaskGroup() as group:
            for client in self._clients:
                group.create_task(client.run())

    # --- requests -----------------------------------------------------------------------------------

    def submit(self, scheduler: SchedulerClient, request: RequestLog, wake: abc.Callable[[], None]) -> None:
        """Hands a request to the scheduler it was placed at; `wake` is called whenever its log has news.

        Raises RequestError, UNAVAILABLE, when requests are not taken there any more.
        """
        scheduler.submit(request, wake)
        self._client_of[request] = scheduler

    def release(self, request: RequestLog, end: End) -> None:
        """Lets a request go: choices that have not ended end with `end`, and their scheduler is told."""
        client = self._client_of.pop(request, None)
        if client is not None:
            client.release(request, end)

    def supersede(self, request: RequestLog, successor: SchedulerClient) -> None:
        """Lets a request go that a newer log of it, about to be submitted to `successor`, goes on with."""
        client = self._client_of.pop(request, None)
        if client is successor:
            client.hand_over(request)
        elif client is not None:
            client.abandon(request)

    def _settle(self) -> None:
        """Brings every request that waits at a scheduler in vain to one that serves."""
        for shard in self._shards:
            leader = shard.leader
            if leader is None and shard.is_lost and self.leaders:
                for member in shard.members:
                    for request in member.requests:
                        self._move(
                            request,
                            member,
                            self.place(placing_name(request.tenant, request.prompt_token_ids)),
                        )
            for member in shard.members:
                if leader is not None and member is not leader:
                    for request in member.requests:
                        self._move(request, member, leader)

    def _move(self, request: RequestLog, source: SchedulerClient, target: SchedulerClient) -> None:
        _log.info(
            "request_moved",
            request_id=request.request_id,
            from_scheduler=source.address.target,
            to_scheduler=target.address.target,
        )
        self.submit(target, request, source.abandon(request))

    def _nobody(self) -> RequestError:
        return RequestError(grpc.StatusCode.UNAVAILABLE, self.refusal or "no scheduler is serving")

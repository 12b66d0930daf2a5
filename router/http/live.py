"""What the live page shows: what the steps of each scheduler change, read once and sent to every viewer.

While nobody watches, no scheduler is asked and nothing is computed. For a viewer that is slow, frames are
dropped, and the next one it gets is whole. Frames are made and encoded once, however many viewers there are.
"""

import asyncio
import contextlib
import json
from collections import abc
from typing import Final

import structlog

from router.latencies import Latencies
from router.ride import Changes, Frame, Ride
from rpc.cancel import heed_cancel
from rpc.errors import RequestError
from rpc.histogram import Histogram

# A page gets what has come in this time as one event; schedulers tell as often as a moving picture needs.
EVENT_SECONDS: Final = 0.04
MAX_FRAMES_PENDING: Final = 128
MAX_LOOKERS: Final = 64
STATS_SECONDS: Final = 1.0
_RETRY_SECONDS: Final = 1.0

_log = structlog.get_logger()

# Reads what one scheduler's steps change until its stream ends, which is a RequestError.
Source = abc.Callable[[], abc.AsyncGenerator[Changes]]

# One request's time line, by its id and tenant; RequestError when there is none.
Story = abc.Callable[[str, str], abc.Awaitable[dict[str, object]]]


class Looker:
    """One page that is open: the frames it has not been sent yet, encoded."""

    def __init__(self) -> None:
        self.pending: list[str] = []
        self.bell = asyncio.Event()
        self.is_behind = False
        self.num_missed = 0

    def offer(self, frame: str) -> None:
        """Keeps a frame for the page; when too many are kept, none is: a whole one will come instead."""
        if self.is_behind:
            self.num_missed += 1
            return
        self.pending.append(frame)
        if len(self.pending) > MAX_FRAMES_PENDING:
            self.num_missed += len(self.pending)
            self.pending.clear()
            self.is_behind = True
        self.bell.set()

    def taken(self) -> list[str]:
        """Everything there is to send."""
        frames, self.pending = self.pending, []
        self.bell.clear()
        return frames


class Live:
    """Who looks, and what there is to see."""

    def __init__(
        self,
        sources: abc.Sequence[Source],
        latencies: Latencies,
        *,
        refusal: abc.Callable[[], str | None],
        story: Story,
    ) -> None:
        """`refusal` tells why no request is taken, None when one is; `story` one request's time line."""
        self.story = story
        self._sources = sources
        self._latencies = latencies
        self._refusal = refusal
        self._rides: dict[str, Ride] = {}
        self._lookers: set[Looker] = set()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_full(self) -> bool:
        """Whether one more page would be one too many."""
        return len(self._lookers) >= MAX_LOOKERS

    async def events(self) -> abc.AsyncGenerator[list[str]]:
        """Frames for one page, several at a time, each a JSON object. Close it when the page is gone."""
        looker = Looker()
        looker.pending = [self._stats(), *self._everything()]
        looker.bell.set()
        self._lookers.add(looker)
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._follow(source)) for source in self._sources]
            self._tasks.append(asyncio.create_task(self._tell_stats()))
        try:
            while True:
                await looker.bell.wait()
                if looker.is_behind:
                    looker.is_behind = False
                    yield [json.dumps({"missed": looker.num_missed}), *self._everything()]
                    looker.num_missed = 0
                frames = looker.taken()
                if frames:
                    yield frames
                await asyncio.sleep(EVENT_SECONDS)
        finally:
            self._lookers.discard(looker)
            if not self._lookers:
                await self._stop()

    async def _stop(self) -> None:
        tasks, self._tasks = self._tasks, []
        self._rides.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _everything(self) -> list[str]:
        return [_encoded(ride.whole()) for ride in self._rides.values()]

    def _tell(self, frame: str) -> None:
        for looker in self._lookers:
            looker.offer(frame)

    async def _follow(self, source: Source) -> None:
        """Reads one scheduler for as long as somebody looks; one that is away is asked again."""
        while True:
            with contextlib.suppress(RequestError):  # its reason is in the router's health, and in the stats
                async with contextlib.aclosing(source()) as following:
                    async for changes in following:
                        ride = self._rides.setdefault(changes.executor_id, Ride())
                        self._tell(_encoded(ride.frame(changes)))
            heed_cancel()
            await asyncio.sleep(_RETRY_SECONDS)

    async def _tell_stats(self) -> None:
        while True:
            await asyncio.sleep(STATS_SECONDS)
            self._tell(self._stats())

    def _stats(self) -> str:
        return _encoded(
            {
                "stats": {
                    "num_tokens": self._latencies.num_tokens,
                    "time_to_first_token": _shape(self._latencies.time_to_first_token),
                    "inter_token": _shape(self._latencies.inter_token),
                    "refusal": self._refusal(),
                }
            }
        )


def _shape(histogram: Histogram) -> Frame:
    return {"bounds": histogram.bounds, "counts": histogram.counts}


def _encoded(frame: Frame) -> str:
    return json.dumps(frame, ensure_ascii=False, allow_nan=False, separators=(",", ":"))

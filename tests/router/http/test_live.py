import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import httpx2
import pytest

from router.http import live
from router.http.app import HttpApp
from router.http.live import Live, Looker
from router.intake import Intake
from router.key_file import Doorkeeper
from router.latencies import Latencies
from router.ride import Changes, Rider, Step
from rpc.errors import RequestError
from tests.router.stack import Start


def step(step_id: int, *seq_ids: int, executor: str = "e") -> Changes:
    riders = tuple(Rider(seq_id, f"r{seq_id}", 0) for seq_id in seq_ids)
    return Changes(executor, step_id, 0.0, None, (Step(step_id, entered=riders),))


class Scheduler:
    """A source of steps that a test feeds; counts how often it is read."""

    def __init__(self) -> None:
        self.steps: asyncio.Queue[Changes | None] = asyncio.Queue()
        self.num_readers = 0
        self.num_times_read = 0

    async def source(self) -> AsyncGenerator[Changes]:
        self.num_readers += 1
        self.num_times_read += 1
        try:
            while (one := await self.steps.get()) is not None:
                yield one
            raise RequestError(grpc.StatusCode.UNAVAILABLE, "gone")
        finally:
            self.num_readers -= 1


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "EVENT_SECONDS", 0.0)
    monkeypatch.setattr(live, "_RETRY_SECONDS", 0.0)


async def no_story(request_id: str, tenant: str) -> dict[str, object]:
    raise RequestError(grpc.StatusCode.NOT_FOUND, f"nothing is known of {request_id!r}")


def looked_at(*schedulers: Scheduler) -> Live:
    return Live([one.source for one in schedulers], Latencies(), refusal=lambda: None, story=no_story)


async def next_frames(events: AsyncGenerator[list[str]], wanted: str = "executor") -> list[dict[str, Any]]:
    """The next frames that have `wanted` in them."""
    async for frames in events:
        found = [frame for frame in map(json.loads, frames) if wanted in frame]
        if found:
            return found
    raise AssertionError("no frame came")


async def test_nobody_looks_and_no_scheduler_is_asked() -> None:
    scheduler = Scheduler()
    page = looked_at(scheduler)
    events = page.events()
    assert scheduler.num_readers == 0
    await next_frames(events, "stats")
    await asyncio.sleep(0)
    assert scheduler.num_readers == 1
    await events.aclose()
    assert scheduler.num_readers == 0


async def test_two_look_and_the_scheduler_is_read_once() -> None:
    scheduler = Scheduler()
    page = looked_at(scheduler)
    first, second = page.events(), page.events()
    await next_frames(first, "stats")
    await next_frames(second, "stats")
    scheduler.steps.put_nowait(step(1, 4))
    assert (await next_frames(first))[0]["steps"][0]["entered"] == [[4, "r4", 0]]
    assert (await next_frames(second))[0]["steps"][0]["entered"] == [[4, "r4", 0]]
    assert scheduler.num_readers == 1
    await first.aclose()
    assert scheduler.num_readers == 1
    await second.aclose()


async def test_who_comes_later_is_told_who_sits_there() -> None:
    scheduler = Scheduler()
    page = looked_at(scheduler)
    first = page.events()
    await next_frames(first, "stats")
    scheduler.steps.put_nowait(step(1, 4, 5))
    await next_frames(first)
    second = page.events()
    assert (await next_frames(second))[0]["seated"] == [[4, "r4", 0], [5, "r5", 0]]
    await first.aclose()
    await second.aclose()


async def test_a_scheduler_that_goes_is_asked_again() -> None:
    scheduler = Scheduler()
    events = looked_at(scheduler).events()
    await next_frames(events, "stats")
    scheduler.steps.put_nowait(None)
    scheduler.steps.put_nowait(step(1, 4))
    assert (await next_frames(events))[0]["step"] == 1
    assert scheduler.num_times_read == 2
    await events.aclose()


async def test_several_executors_are_told_apart() -> None:
    scheduler = Scheduler()
    events = looked_at(scheduler).events()
    await next_frames(events, "stats")
    for executor in "ab":
        scheduler.steps.put_nowait(step(1, 4, executor=executor))
    seen: set[str] = set()
    while seen != {"a", "b"}:
        seen |= {frame["executor"] for frame in await next_frames(events)}
    await events.aclose()


async def test_a_page_that_does_not_read_keeps_no_more_than_its_share_and_then_gets_a_whole_frame() -> None:
    scheduler = Scheduler()
    page = looked_at(scheduler)
    slow, quick = page.events(), page.events()
    await next_frames(slow, "stats")
    await next_frames(quick, "stats")
    for step_id in range(1, 2 * live.MAX_FRAMES_PENDING):
        scheduler.steps.put_nowait(step(step_id, step_id))
        await next_frames(quick)
    frames = json.loads("[" + ",".join(await anext(slow)) + "]")
    assert frames[0]["missed"] > live.MAX_FRAMES_PENDING
    assert len(frames[1]["seated"]) == step_id
    await slow.aclose()
    await quick.aclose()


def test_a_looker_that_is_behind_holds_nothing() -> None:
    looker = Looker()
    for i in range(live.MAX_FRAMES_PENDING + 5):
        looker.offer(str(i))
    assert (looker.pending, looker.is_behind, looker.num_missed) == ([], True, live.MAX_FRAMES_PENDING + 5)


# --- at the door --------------------------------------------------------------------------------------------


def at_the_door(page: Live, doorkeeper: Doorkeeper, intake: Intake) -> httpx2.AsyncClient:
    app = HttpApp(intake, max_body_bytes=1024, doorkeeper=doorkeeper, live=page)
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app.asgi), base_url="http://localhost")


async def test_a_story_is_told_to_its_owner(start: Start) -> None:
    asked = []

    async def story(request_id: str, tenant: str) -> dict[str, object]:
        asked.append((request_id, tenant))
        return {"request_id": request_id, "entries": []}

    async with start() as rig:
        page = Live([], Latencies(), refusal=lambda: None, story=story)
        async with at_the_door(page, rig.doorkeeper, rig.intake) as client:
            told = await client.get("/live/requests/a/b")
            assert told.json() == {"request_id": "a/b", "entries": []}
            assert asked == [("a/b", "")]
            named = await client.get("/live/requests/a?tenant=blue")  # without keys there are no tenants
            assert named.status_code == 400
            missing = at_the_door(looked_at(), rig.doorkeeper, rig.intake)
            assert (await missing.get("/live/requests/x")).status_code == 404


async def test_the_page_is_served_and_looks_at_nobody_elses_things(start: Start) -> None:
    async with start() as rig, at_the_door(looked_at(), rig.doorkeeper, rig.intake) as client:
        index = await client.get("/")
        assert index.headers["content-type"] == "text/html; charset=utf-8"
        assert "script-src 'self'" in index.headers["content-security-policy"]
        assert index.headers["x-content-type-options"] == "nosniff"
        assert len(index.headers.get_list("content-security-policy")) == 1

"""The streams to the schedulers: finding them, losing them, placing requests among them."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Self

import grpc
import pytest

from protos.v1 import scheduler_pb2
from router.request_log import End, FinishReason, RequestLog
from router.scheduler_client import SchedulerClient
from router.scheduler_pool import SchedulerPool
from router.scheduler_session import TokenizerIdentity
from rpc.address import Address
from rpc.errors import RequestError
from tests.rig.scripted_scheduler import MAX_MESSAGE_BYTES, ScriptedScheduler, Stream, serving
from tests.router.stack import eventually
from tests.router.test_scheduler_session import new_request

LEAVE = End(FinishReason.ABORT)


class Changes:
    """Counts how often a client said that serving may have changed, and lets a test wait for more."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def __call__(self) -> None:
        self._changed.set()

    async def until_serving(self, client: SchedulerClient, *, yes: bool = True) -> None:
        async with asyncio.timeout(20):
            while (client.refusal is None) is not yes:
                self._changed.clear()
                await self._changed.wait()


def new_client(address: str, changes: Changes, *, recovery_timeout_seconds: float = 60.0) -> SchedulerClient:
    return SchedulerClient(
        Address.parse(address, field="--scheduler"),
        router_id="router-1",
        tokenizer=TokenizerIdentity("", 260),
        recovery_timeout_seconds=recovery_timeout_seconds,
        max_message_bytes=MAX_MESSAGE_BYTES,
        on_serving_changed=changes,
    )


@contextlib.asynccontextmanager
async def running(pool: SchedulerPool) -> AsyncIterator[None]:
    task = asyncio.create_task(pool.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


async def test_b108_a_dead_scheduler_does_not_keep_the_others_from_serving(tmp_path: Path) -> None:
    changes, late_changes = Changes(), Changes()
    live = new_client(f"unix:{tmp_path}/live.sock", changes)
    dead = new_client(f"unix:{tmp_path}/dead.sock", late_changes)
    pool = SchedulerPool([dead, live])
    async with serving(ScriptedScheduler(), tmp_path / "live.sock"), running(pool):
        await changes.until_serving(live)
        assert pool.refusal is None
        assert {pool.place(f"request-{i}") for i in range(50)} == {live}
        async with serving(ScriptedScheduler(), tmp_path / "dead.sock"):  # it is noticed when it comes
            await late_changes.until_serving(dead)
            assert {pool.place(f"request-{i}") for i in range(50)} == {live, dead}


async def test_a_name_keeps_its_scheduler_when_another_one_leaves(tmp_path: Path) -> None:
    changes = Changes()
    clients = [new_client(f"unix:{tmp_path}/{i}.sock", changes) for i in range(3)]
    pool = SchedulerPool(clients)
    schedulers = [ScriptedScheduler() for _ in clients]
    async with contextlib.AsyncExitStack() as stack:
        for i, scheduler in enumerate(schedulers):
            await stack.enter_async_context(serving(scheduler, tmp_path / f"{i}.sock"))
        await stack.enter_async_context(running(pool))
        for client in clients:
            await changes.until_serving(client)
        names = [f"request-{i}" for i in range(60)]
        before = {name: pool.place(name) for name in names}
        assert set(before.values()) == set(clients)
        await schedulers[0].set_serving(serving=False, reason="leaving")
        await changes.until_serving(clients[0], yes=False)
        for name in names:
            if before[name] is not clients[0]:
                assert pool.place(name) is before[name]


async def test_without_any_scheduler_every_reason_is_told(tmp_path: Path) -> None:
    pool = SchedulerPool([new_client(f"unix:{tmp_path}/{name}.sock", Changes()) for name in "ab"])
    with pytest.raises(RequestError, match=r"a\.sock.*b\.sock") as raised:
        pool.place("r")
    assert raised.value.code is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(RequestError) as raised:
        pool.welcome()
    assert raised.value.code is grpc.StatusCode.UNAVAILABLE


async def test_b86_a_scheduler_that_was_restarted_is_found_again(tmp_path: Path) -> None:
    changes = Changes()
    client = new_client(f"unix:{tmp_path}/s.sock", changes)
    async with running(SchedulerPool([client])):
        for _ in range(2):
            async with serving(ScriptedScheduler(), tmp_path / "s.sock"):
                await changes.until_serving(client)
            await changes.until_serving(client, yes=False)


async def test_requests_wait_for_a_restarted_scheduler_and_go_on_there(tmp_path: Path) -> None:
    changes, woken = Changes(), asyncio.Event()
    client = new_client(f"unix:{tmp_path}/s.sock", changes)
    request = new_request()
    async with running(SchedulerPool([client])):
        first = ScriptedScheduler()
        async with serving(first, tmp_path / "s.sock"):
            await changes.until_serving(client)
            client.submit(request, woken.set)
            await first.give(await first.submitted(), [97])
            await woken.wait()
        await changes.until_serving(client, yes=False)
        assert client.num_live == 1
        second = ScriptedScheduler()
        async with serving(second, tmp_path / "s.sock"):
            submit = await second.submitted()
            assert list(submit.output_token_ids) == [97]
            client.release(request, LEAVE)
            await second.until(lambda: bool(second.cancels))
            assert client.num_live == 0


async def test_a_message_for_a_hundred_requests_wakes_some_at_a_time_and_others_have_their_turn(
    tmp_path: Path,
) -> None:
    changes, scheduler = Changes(), ScriptedScheduler()
    client = new_client(f"unix:{tmp_path}/s.sock", changes)
    requests = [new_request(f"r{number}") for number in range(100)]
    woken: Counter[int] = Counter()
    turn, is_due = 0, False

    async def count_turns() -> None:
        nonlocal turn
        while sum(woken.values()) < len(requests):
            turn += 1
            await asyncio.sleep(0)

    def wake() -> None:
        if is_due:
            woken[turn] += 1

    async with running(SchedulerPool([client])), serving(scheduler, tmp_path / "s.sock"):
        await changes.until_serving(client)
        for request in requests:
            client.submit(request, wake)
        await scheduler.submitted(len(requests))
        await eventually(lambda: all(request.taken_in for request in requests))
        handles = [submit.handle for submit in scheduler.submits]
        is_due = True
        counting = asyncio.create_task(count_turns())
        await scheduler.send(
            scheduler_pb2.StepOutput(handles=handles, num_tokens=[1] * 100, token_ids=[97] * 100)
        )
        async with asyncio.timeout(20):
            await counting
        for request in requests:
            assert list(request.choices[0].output_token_ids) == [97]
            client.release(request, LEAVE)
    assert max(woken.values()) <= 16


async def test_news_that_come_faster_than_they_are_told_are_told_together_and_all_of_them(
    tmp_path: Path,
) -> None:
    num_messages = 40
    changes, scheduler = Changes(), ScriptedScheduler()
    client = new_client(f"unix:{tmp_path}/s.sock", changes)
    requests = [new_request(f"r{number}", max_tokens=num_messages) for number in range(64)]
    told: dict[str, list[int]] = {request.request_id: [] for request in requests}

    def wake(request: RequestLog) -> None:
        if delta := request.choices[0].take_delta():
            time.sleep(0.001)  # what it costs to write, to the loop as well
            told[request.request_id].append(len(delta.token_ids))

    async with running(SchedulerPool([client])), serving(scheduler, tmp_path / "s.sock"):
        await changes.until_serving(client)
        for request in requests:
            client.submit(request, partial(wake, request))
        await scheduler.submitted(len(requests))
        handles = [submit.handle for submit in scheduler.submits]
        for _ in range(num_messages):
            await scheduler.send(
                scheduler_pb2.StepOutput(handles=handles, num_tokens=[1] * 64, token_ids=[97] * 64)
            )
        await eventually(lambda: all(sum(lengths) == num_messages for lengths in told.values()))
        for request in requests:
            client.release(request, LEAVE)
    assert max(map(len, told.values())) < num_messages


class Babbling(ScriptedScheduler):
    """Welcomes every router, then says what no router can read, or a handle that nobody gave."""

    def __init__(self, *, unreadable: bool) -> None:
        super().__init__()
        self._unreadable = unreadable

    async def _greet(self, stream: Stream) -> None:
        await super()._greet(stream)
        output = scheduler_pb2.StepOutput(message_id=1, accepted=[77])
        if self._unreadable:
            await stream.context.write(b"\xff\xff\xff")  # type: ignore[arg-type]  # bytes pass the serializer below
        else:
            await stream.context.write(scheduler_pb2.SchedulerMessage(step_output=output))


@pytest.mark.parametrize("unreadable", [True, False])
async def test_a_scheduler_that_breaks_the_protocol_each_time_is_as_good_as_away(
    tmp_path: Path, unreadable: bool
) -> None:
    changes = Changes()
    client = new_client(f"unix:{tmp_path}/s.sock", changes, recovery_timeout_seconds=0.5)
    request = new_request()
    async with running(SchedulerPool([client])):
        async with serving(ScriptedScheduler(), tmp_path / "s.sock"):
            await changes.until_serving(client)
            client.submit(request, lambda: None)
        babbling = Babbling(unreadable=unreadable)
        async with serving(babbling, tmp_path / "s.sock", serialize=as_bytes):
            await eventually(lambda: request.ended)
            assert 1 < len(babbling.streams) < 20, "it was tried again, and not without pause"
    end = request.choices[0].end
    assert end is not None
    assert end.status_code == 14
    words = "a message could not be read" if unreadable else "handle 77 was never given"
    assert f"it broke the protocol: {words}" in end.message


class EndedByCancel:
    """A call that takes the cancel of its task for its own end, as grpc.aio does when both come at once."""

    def __init__(self, begun: asyncio.Event) -> None:
        self._begun = begun

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> None:
        self._begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())

    async def write(self, _message: object) -> None:
        await asyncio.sleep(60)

    def cancel(self) -> None:
        pass


async def test_a_client_ends_when_it_is_cancelled_in_the_instant_in_which_its_stream_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, begun = new_client(f"unix:{tmp_path}/s.sock", Changes()), asyncio.Event()
    monkeypatch.setattr(client._stub, "Connect", lambda: EndedByCancel(begun))
    async with running(SchedulerPool([client])):
        await begun.wait()


def as_bytes(message: scheduler_pb2.SchedulerMessage | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()

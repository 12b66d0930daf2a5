"""Shards and standbys: who gets a request, and where it goes when its scheduler is lost."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protos.v1 import common_pb2
from router.request_log import End, FinishReason
from router.scheduler_client import SchedulerClient
from router.scheduler_pool import PLACING_TOKENS, SchedulerPool, placing_name
from router.scheduler_session import TokenizerIdentity
from rpc.address import Address
from tests.rig.scripted_scheduler import MAX_MESSAGE_BYTES, ScriptedScheduler, serving
from tests.router.stack import eventually
from tests.router.test_scheduler_client import running
from tests.router.test_scheduler_session import new_request

LENGTH = common_pb2.FINISH_REASON_LENGTH


class Rig:
    """A pool before schedulers that are served one by one; `shards` names the shard of each."""

    def __init__(self, folder: Path, shards: dict[str, str], *, reconnect_seconds: float) -> None:
        self.schedulers = {name: ScriptedScheduler() for name in shards}
        self.clients = {
            name: SchedulerClient(
                Address.parse(f"unix:{folder}/{name}.sock", field="--scheduler"),
                router_id="router-1",
                tokenizer=TokenizerIdentity("", 260),
                recovery_timeout_seconds=60.0,
                max_message_bytes=MAX_MESSAGE_BYTES,
                on_serving_changed=lambda: None,
                shard=shard,
                reconnect_seconds=reconnect_seconds,
            )
            for name, shard in shards.items()
        }
        self.pool = SchedulerPool(list(self.clients.values()))
        self._folder = folder
        self._served: dict[str, contextlib.AsyncExitStack] = {}

    async def serve(self, name: str, *, term: int = 1) -> None:
        """From now on the scheduler leads at this term."""
        welcome = self.schedulers[name].welcome
        assert welcome is not None
        welcome.term = term
        await self.listen(name)
        await eventually(lambda: self.clients[name].refusal is None)

    async def listen(self, name: str) -> None:
        self._served[name] = contextlib.AsyncExitStack()
        address = serving(self.schedulers[name], self._folder / f"{name}.sock")
        await self._served[name].enter_async_context(address)

    async def lose(self, name: str) -> None:
        await self._served.pop(name).aclose()
        await eventually(lambda: self.clients[name].refusal is not None)

    async def close(self) -> None:
        for stack in self._served.values():
            await stack.aclose()


@contextlib.asynccontextmanager
async def pool_of(
    folder: Path, shards: dict[str, str], *, reconnect_seconds: float = 60.0
) -> AsyncIterator[Rig]:
    rig = Rig(folder, shards, reconnect_seconds=reconnect_seconds)
    async with running(rig.pool):
        try:
            yield rig
        finally:
            await rig.close()


def test_a_tenant_stays_together_and_so_do_requests_that_begin_alike() -> None:
    head = tuple(range(PLACING_TOKENS))
    assert placing_name("t", (1,)) == placing_name("t", (2,)) == "t"
    assert placing_name("", (*head, 1)) == placing_name("", (*head, 2))
    assert placing_name("", (1, 2)) != placing_name("", (1, 3))


async def test_b106_what_ran_at_a_lost_leader_goes_on_at_its_standby_at_once(tmp_path: Path) -> None:
    async with pool_of(tmp_path, {"a": "s", "b": "s"}) as rig:
        await rig.serve("a", term=1)
        request = new_request(n=2)
        rig.pool.submit(rig.pool.place("x"), request, lambda: None)
        await rig.schedulers["a"].give(await rig.schedulers["a"].submitted(), [97])
        await eventually(lambda: request.choices[0].output_token_ids == [97])
        request.accepted = True
        await rig.lose("a")
        assert rig.pool.refusal is not None
        await rig.serve("b", term=2)
        submit = await rig.schedulers["b"].submitted(2)
        assert [list(one.output_token_ids) for one in rig.schedulers["b"].submits] == [[97], []]
        assert submit.accepted_before
        assert rig.pool.refusal is None
        rig.pool.release(request, End(FinishReason.ABORT))
        await rig.schedulers["b"].until(lambda: len(rig.schedulers["b"].cancels) == 2)


async def test_a_lower_term_is_left_for_a_higher_one_and_says_nothing_any_more(tmp_path: Path) -> None:
    """The old leader was frozen: its stream lives, it thinks that it leads, and it speaks."""
    async with pool_of(tmp_path, {"a": "s", "b": "s"}) as rig:
        await rig.serve("a", term=4)
        request = new_request()
        rig.pool.submit(rig.pool.place("x"), request, lambda: None)
        old = await rig.schedulers["a"].submitted()
        await rig.schedulers["a"].give(old, [97])
        await eventually(lambda: request.choices[0].output_token_ids == [97])
        await rig.serve("b", term=5)
        new = await rig.schedulers["b"].submitted()
        assert list(new.output_token_ids) == [97]
        await rig.schedulers["a"].give(old, [120, 121], finish=LENGTH)
        await rig.schedulers["a"].until(lambda: 3 in rig.schedulers["a"].acks)
        assert rig.pool.place("x") is rig.clients["b"]
        await rig.schedulers["b"].give(new, [98], finish=LENGTH)
        await eventually(lambda: request.ended)
        assert request.choices[0].output_token_ids == [97, 98]


async def test_requests_of_a_lost_shard_go_elsewhere_only_after_its_window(tmp_path: Path) -> None:
    async with pool_of(tmp_path, {"a": "1", "b": "2"}, reconnect_seconds=0.5) as rig:
        await rig.serve("a")
        request = new_request()
        rig.pool.submit(rig.pool.place("x"), request, lambda: None)
        first = await rig.schedulers["a"].submitted()
        await rig.serve("b")
        await rig.lose("a")
        assert rig.clients["a"].num_live == 1, "it waits for its own shard first"
        second = await rig.schedulers["b"].submitted()
        assert rig.clients["a"].is_lost
        assert (second.key, rig.clients["a"].num_live) == (first.key, 0)
        await rig.schedulers["b"].give(second, [98], finish=LENGTH)
        await eventually(lambda: request.ended)
        await rig.serve("a")  # it is back, and told that nobody waits for this here
        await rig.schedulers["a"].until(lambda: bool(rig.schedulers["a"].cancels))
        assert rig.schedulers["a"].cancels[0].key == first.key


async def test_a_shard_that_is_back_in_time_keeps_its_requests(tmp_path: Path) -> None:
    async with pool_of(tmp_path, {"a": "1", "b": "2"}) as rig:
        await rig.serve("a")
        request = new_request()
        rig.pool.submit(rig.pool.place("x"), request, lambda: None)
        await rig.schedulers["a"].submitted()
        await rig.serve("b")
        await rig.lose("a")
        await rig.serve("a")
        await rig.schedulers["a"].submitted(2)
        assert not rig.schedulers["b"].submits


@pytest.mark.parametrize("tenant", ["", "t"])
async def test_a_newer_log_of_a_request_goes_on_at_the_same_scheduler_in_silence(
    tmp_path: Path, tenant: str
) -> None:
    async with pool_of(tmp_path, {"a": "1"}) as rig:
        await rig.serve("a")
        older, newer = new_request(), new_request()
        client = rig.pool.place(placing_name(tenant, older.prompt_token_ids))
        rig.pool.submit(client, older, lambda: None)
        await rig.schedulers["a"].submitted()
        newer.choices[0].resume([97], 1.0)
        rig.pool.supersede(older, client)
        rig.pool.submit(client, newer, lambda: None)
        rig.pool.release(older, End(FinishReason.ABORT))
        submit = await rig.schedulers["a"].submitted(2)
        assert list(submit.output_token_ids) == [97]
        await rig.schedulers["a"].give(submit, [98], finish=LENGTH)
        await eventually(lambda: newer.ended)
        assert not rig.schedulers["a"].cancels
        assert not older.ended

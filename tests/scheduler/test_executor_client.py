"""What the statuses of an executor mean to the scheduler."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from protos.v1 import executor_pb2
from rpc.address import Address
from scheduler import executor_client
from scheduler.executor_client import EpochLostError, ExecutorClient, ExecutorUnreachableError, HeldError
from tests.scheduler.shell import ObedientExecutor, serving_executor, until

MAX_MESSAGE_BYTES = 1 << 20


class Stubborn(ObedientExecutor):
    """Answers every call with one status."""

    def __init__(self, status: grpc.StatusCode | None) -> None:
        super().__init__()
        self.status = status

    async def Open(self, request: Any, context: Any) -> Any:  # noqa: N802 - named by the contract
        if self.status is not None:
            await context.abort(self.status, "so it is")
        return await super().Open(request, context)

    async def Execute(  # type: ignore[override]  # noqa: N802 - it writes through the context
        self, _: Any, context: Any
    ) -> None:
        if self.status is not None:
            await context.abort(self.status, "so it is")


@pytest.fixture
async def address() -> AsyncIterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield f"unix:{folder}/e.sock"


@pytest.fixture
async def client(address: str) -> AsyncIterator[ExecutorClient]:
    one = ExecutorClient(Address.parse(address, field="--executor"), max_message_bytes=MAX_MESSAGE_BYTES)
    yield one
    await one.close()


MEANINGS = [
    (grpc.StatusCode.FAILED_PRECONDITION, EpochLostError),
    (grpc.StatusCode.DATA_LOSS, EpochLostError),
    (grpc.StatusCode.PERMISSION_DENIED, HeldError),
    (grpc.StatusCode.ABORTED, ExecutorUnreachableError),
    (grpc.StatusCode.UNAVAILABLE, ExecutorUnreachableError),
    (grpc.StatusCode.INTERNAL, ExecutorUnreachableError),
    (grpc.StatusCode.OK, ExecutorUnreachableError),
]


async def test_an_executor_that_takes_the_call_and_does_not_answer_is_told_as_that(
    address: str, client: ExecutorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent(ObedientExecutor):
        async def Open(self, request: Any, context: Any) -> Any:  # noqa: N802 - named by the contract
            await asyncio.Event().wait()

    monkeypatch.setattr(executor_client, "OPEN_TIMEOUT_SECONDS", 0.2)
    async with serving_executor(Silent(), address):
        with pytest.raises(ExecutorUnreachableError, match=r"^it takes the call and does not answer"):
            await client.open("a")


@pytest.mark.parametrize(("status", "meaning"), MEANINGS)
async def test_a_streams_end_is_raised_as_what_it_means(
    address: str, client: ExecutorClient, status: grpc.StatusCode, meaning: type[Exception]
) -> None:
    executor = Stubborn(None if status is grpc.StatusCode.OK else status)
    async with serving_executor(executor, address):
        stream = client.execute()
        with pytest.raises(meaning) as error:
            await anext(stream.results())
    assert status is grpc.StatusCode.OK or f"{status.name}: so it is" in str(error.value)


@pytest.mark.parametrize(
    ("status", "meaning"), [item for item in MEANINGS if item[0] is not grpc.StatusCode.OK]
)
async def test_a_refused_open_is_raised_as_what_it_means(
    address: str, client: ExecutorClient, status: grpc.StatusCode, meaning: type[Exception]
) -> None:
    async with serving_executor(Stubborn(status), address):
        with pytest.raises(meaning, match="so it is"):
            await client.open("me")


async def test_who_holds_it_is_told_by_the_name_it_has(address: str, client: ExecutorClient) -> None:
    async with serving_executor(ObedientExecutor(), address):
        await client.open("zürich 1", 7)
        with pytest.raises(HeldError) as held:
            await client.open("me", 6)
    assert (held.value.holder, held.value.term) == ("zürich 1", 7)


async def test_nobody_there_is_unreachable(client: ExecutorClient) -> None:
    with pytest.raises(ExecutorUnreachableError, match="nobody answers"):
        await client.open("me")


async def test_a_plan_for_a_stream_that_has_ended_is_unreachable_not_a_fault(
    address: str, client: ExecutorClient
) -> None:
    async with serving_executor(Stubborn(grpc.StatusCode.FAILED_PRECONDITION), address):
        stream = client.execute()
        with pytest.raises(EpochLostError):
            await anext(stream.results())
        for _ in range(2):
            with pytest.raises(ExecutorUnreachableError, match="ended"):
                await stream.send(executor_pb2.BatchPlan(epoch=1, step_id=1).SerializeToString())


async def test_an_open_executor_tells_epoch_term_and_capacity(address: str, client: ExecutorClient) -> None:
    executor = ObedientExecutor()
    async with serving_executor(executor, address):
        first = await client.open("me")
        second = await client.open("me")
        assert executor.epoch is not None
        assert second.epoch == executor.epoch.number != first.epoch
        assert (first.term, second.term) == (1, 2)
        assert second.capacity.num_blocks == 512


async def test_a_stream_that_is_broken_off_is_gone_at_the_executor_too(
    address: str, client: ExecutorClient
) -> None:
    executor = ObedientExecutor()
    async with serving_executor(executor, address):
        opened = await client.open("me")
        stream = client.execute()
        await stream.send(executor_pb2.BatchPlan(epoch=opened.epoch, step_id=1).SerializeToString())
        assert (await anext(stream.results())).step_id == 1
        assert len(executor.streams) == 1
        stream.cancel()
        await until(lambda: not executor.streams)
        await asyncio.sleep(0)

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc.health import LIVENESS, READINESS, Health

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
FOR_EVER = 3600.0


class Subject:
    """A health service behind a real server, with the words that clients get."""

    def __init__(self, health: Health, stub: health_pb2_grpc.HealthStub) -> None:
        self.health = health
        self.stub = stub

    async def words(self) -> dict[str, bool]:
        names = ("", "skis", READINESS, LIVENESS)
        answers = {name: await self.stub.Check(health_pb2.HealthCheckRequest(service=name)) for name in names}
        return {name: answer.status == SERVING for name, answer in answers.items()}

    async def until(self, name: str, status: int) -> None:
        watch = self.stub.Watch(health_pb2.HealthCheckRequest(service=name))
        async for answer in watch:
            if answer.status == status:
                break
        watch.cancel()


@pytest.fixture
async def subject(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    health = Health(["skis"], patience_seconds=request.param)
    server = grpc.aio.server()
    await health.register(server)
    server.add_insecure_port(f"unix:{tmp_path}/h.sock")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/h.sock") as channel:
        yield Subject(health, health_pb2_grpc.HealthStub(channel))
    await server.stop(0)


@pytest.mark.parametrize("subject", [0.0, FOR_EVER], indirect=True)
async def test_at_first_it_is_alive_and_nothing_else(subject: Subject) -> None:
    assert await subject.words() == {"": False, "skis": False, READINESS: False, LIVENESS: True}
    subject.health.serving(True)
    await subject.until(READINESS, SERVING)
    assert all((await subject.words()).values())


@pytest.mark.parametrize("subject", [FOR_EVER], indirect=True)
async def test_readiness_outlasts_a_short_not_serving(subject: Subject) -> None:
    subject.health.serving(True)
    subject.health.serving(False, "the scheduler restarts")
    await subject.until("skis", NOT_SERVING)
    assert await subject.words() == {"": False, "skis": False, READINESS: True, LIVENESS: True}
    subject.health.serving(True)
    await subject.until("skis", SERVING)
    assert all((await subject.words()).values())


@pytest.mark.parametrize("subject", [0.05], indirect=True)
async def test_readiness_falls_when_not_serving_lasts_and_comes_back_at_once(subject: Subject) -> None:
    subject.health.serving(True)
    await subject.until(READINESS, SERVING)
    subject.health.serving(False, "the scheduler is gone")
    await subject.until(READINESS, NOT_SERVING)
    assert (await subject.words())[LIVENESS]
    subject.health.serving(True)
    await subject.until(READINESS, SERVING)


@pytest.mark.parametrize("subject", [FOR_EVER], indirect=True)
async def test_who_is_told_to_stop_is_not_ready_at_once_for_good_and_alive_to_the_end(
    subject: Subject,
) -> None:
    subject.health.serving(True)
    await subject.until(READINESS, SERVING)
    await subject.health.shut_down()
    subject.health.serving(True)
    assert await subject.words() == {"": False, "skis": False, READINESS: False, LIVENESS: True}

"""The toy executor in this process, spoiled in one way, and what conformance says of it."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from chairlift import conformance, step_driver
from chairlift.conformance import Outcome, Verdict
from chairlift.protocol_checks import SERVICE_NAME
from protos.v1 import executor_pb2_grpc
from tests.rig import toy_executor

Spoil = Callable[[pytest.MonkeyPatch, toy_executor.ToyExecutor], None]


@contextlib.asynccontextmanager
async def serving(executor: toy_executor.ToyExecutor, folder: Path) -> AsyncIterator[str]:
    """Its address, for as long as it is served."""
    server = grpc.aio.server()
    executor_pb2_grpc.add_ExecutorServicer_to_server(executor, server)
    healthy: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]
    for name in ("", SERVICE_NAME):
        await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    address = f"unix:{folder}/toy.sock"
    server.add_insecure_port(address)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


async def failing(spoil: Spoil, folder: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The checks that fail at a spoiled toy; all others ran too, and none of them but by its verdict."""
    monkeypatch.setattr(step_driver, "_EARLY_REFUSAL_SECONDS", 0.02)
    executor = toy_executor.ToyExecutor()
    spoil(monkeypatch, executor)
    outcomes: list[Outcome] = []
    async with serving(executor, folder) as address:
        await conformance.run(address, outcomes.append, timeout_seconds=1.0)
    assert len(outcomes) == len(conformance.CHECKS)
    assert all(outcome.sentence for outcome in outcomes)
    return {outcome.name for outcome in outcomes if outcome.verdict is Verdict.FAILED}


# --- ways to be wrong -------------------------------------------------------------------------------


def believing(*sentences: str) -> Spoil:
    """Does not look at what these sentences tell of."""

    def spoil(monkeypatch: pytest.MonkeyPatch, _: toy_executor.ToyExecutor) -> None:
        check = toy_executor.check

        def lenient(holds: bool, sentence: str) -> None:
            check(holds or any(known in sentence for known in sentences), sentence)

        monkeypatch.setattr(toy_executor, "check", lenient)

    return spoil


def computing_all(sentence: str) -> Spoil:
    """Computes requests of which this is wrong."""

    def spoil(monkeypatch: pytest.MonkeyPatch, _: toy_executor.ToyExecutor) -> None:
        fault_of = toy_executor.fault_of

        def ignoring(new: Any) -> str:
            fault = fault_of(new)
            return "" if sentence in fault else fault

        monkeypatch.setattr(toy_executor, "fault_of", ignoring)

    return spoil


def with_options(**options: Callable[[Any], Any]) -> Spoil:
    """Takes options for others: each by what it was."""

    def spoil(monkeypatch: pytest.MonkeyPatch, _: toy_executor.ToyExecutor) -> None:
        init = toy_executor.Sequence.__init__

        def init_otherwise(self: toy_executor.Sequence, new: Any) -> None:
            init(self, new)
            self.sampling = type(new.sampling)()
            self.sampling.CopyFrom(new.sampling)
            for name, other in options.items():
                setattr(self.sampling, name, other(getattr(new.sampling, name)))

        monkeypatch.setattr(toy_executor.Sequence, "__init__", init_otherwise)

    return spoil


def method(owner: type, name: str, broken: Callable[[Any], Any]) -> Spoil:
    """A method in its broken form, which is given the right one."""

    def spoil(monkeypatch: pytest.MonkeyPatch, _: toy_executor.ToyExecutor) -> None:
        monkeypatch.setattr(owner, name, broken(getattr(owner, name)))

    return spoil


def draws_by(index: Callable[[toy_executor.Sequence, int], Any]) -> Spoil:
    """Draws by another place than that in the output."""
    return method(
        toy_executor.Sequence,
        "drawn",
        lambda drawn: lambda self, ids, weights, i: drawn(self, ids, weights, index(self, i)),
    )

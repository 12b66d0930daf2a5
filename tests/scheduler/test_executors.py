"""Executors that hang, leave, come back as others, or die of what they compute, as the loops see it."""

import asyncio
from collections.abc import AsyncIterator, Container
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from protos.v1 import executor_pb2
from rpc.address import Address
from scheduler import executor_loop
from scheduler.policy import Limits
from tests.rig import toy_executor
from tests.scheduler.shell import (
    ObedientExecutor,
    Router,
    Shell,
    expected_ids,
    running_shell,
    serving_executor,
    until,
)

UNAVAILABLE, INTERNAL = grpc.StatusCode.UNAVAILABLE.value[0], grpc.StatusCode.INTERNAL.value[0]


class Executors:
    """A shell with as many executors as a test wants."""

    def __init__(self, shell: Shell, stack: AsyncExitStack) -> None:
        self.shell = shell
        self._stack = stack

    def address(self, name: str) -> str:
        return self.shell.executor_address.replace("executor.sock", f"{name}.sock")

    async def serve(self, executor: ObedientExecutor, name: str = "executor") -> grpc.aio.Server:
        return await self._stack.enter_async_context(serving_executor(executor, self.address(name)))

    def expect(self, name: str) -> None:
        """The scheduler looks for an executor of that name too."""
        loop = self.shell.executor_loop(Address.parse(self.address(name), field="--executor"))
        self.shell.tasks.append(asyncio.create_task(loop.run()))

    async def attached(self, *names: str) -> None:
        await until(lambda: {self.address(name) for name in names} <= set(self.shell.core.executors))


@pytest.fixture
async def quick() -> AsyncIterator[Executors]:
    """Steps may take half a second here."""
    limits = Limits(watermark=0.0, recovery_timeout_seconds=0.8)
    async with AsyncExitStack() as stack:
        shell = await stack.enter_async_context(running_shell(limits, step_timeout_seconds=0.5))
        yield Executors(shell, stack)


async def submit(router: Router, count: int, num_tokens: int) -> None:
    for handle in range(1, count + 1):
        await router.submit(handle, f"r{handle}", [handle, 7], num_tokens)


def right(router: Router, handle: int, num_tokens: int) -> bool:
    return router.ids[handle] == expected_ids([handle, 7], num_tokens)


# --- hung ---------------------------------------------------------------------------------------------


async def test_b105_a_hung_executor_is_found_out_and_its_work_goes_on_elsewhere(quick: Executors) -> None:
    hung, other = ObedientExecutor(), ObedientExecutor()
    await quick.serve(hung)
    router = await quick.shell.welcomed()
    await submit(router, 4, 40)
    await until(lambda: len(hung.plans) >= 3)
    hung.may_answer.clear()
    quick.expect("other")
    await quick.serve(other, "other")
    await until(lambda: len(router.finished) == 4)
    assert all(right(router, handle, 40) for handle in range(1, 5))
    old_epoch = hung.plans[0].epoch
    num_plans = len(hung.plans)
    hung.may_answer.set()  # thawed: what it says of its old epoch is nobody's
    await submit_more(router, quick)
    assert all(plan.epoch != old_epoch for plan in hung.plans[num_plans:])


async def submit_more(router: Router, quick: Executors) -> None:
    await router.submit(99, "r99", [9, 9], 5)
    await until(lambda: 99 in router.finished)
    assert router.ids[99] == expected_ids([9, 9], 5)


async def test_an_executor_that_hangs_alone_is_opened_anew_and_goes_on(quick: Executors) -> None:
    executor = ObedientExecutor()
    await quick.serve(executor)
    router = await quick.shell.welcomed()
    await router.submit(1, "r1", [1, 7], 30)
    await until(lambda: len(executor.plans) >= 3)
    executor.may_answer.clear()
    await until(lambda: executor.num_opened >= 2)
    executor.may_answer.set()
    await until(lambda: 1 in router.finished)
    assert right(router, 1, 30)


async def test_b93_steps_within_their_time_are_busy_and_not_hung(quick: Executors) -> None:
    executor = ObedientExecutor()
    await quick.serve(executor)
    router = await quick.shell.welcomed()
    executor.may_answer.clear()
    await router.submit(1, "r1", [1, 7], 3)
    await until(lambda: executor.plans)
    executor.may_answer.set()
    await until(lambda: 1 in router.finished)
    assert executor.num_opened == 1


# --- nobody left --------------------------------------------------------------------------------------


async def test_b92_without_an_executor_requests_pause_and_then_end_unavailable(quick: Executors) -> None:
    server = await quick.serve(executor := ObedientExecutor())
    router = await quick.shell.welcomed()
    await router.submit(1, "r1", [1, 7], 100)
    await until(lambda: len(executor.plans) >= 3)
    executor.may_answer.clear()
    await server.stop(0)
    await until(lambda: not router.statuses[-1].serving)
    await router.submit(2, "r2", [2, 7], 5)
    await until(lambda: 2 in router.finished)
    assert router.finished[2].status_code == UNAVAILABLE
    await until(lambda: 1 in router.finished)
    assert router.finished[1].status_code == UNAVAILABLE
    assert "no executor came back within 0.8 seconds" in router.finished[1].message
    assert expected_ids([1, 7], 100)[: len(router.ids[1])] == router.ids[1]


async def test_b92_with_a_recovery_timeout_of_zero_running_requests_end_at_once() -> None:
    async with running_shell(Limits(watermark=0.0, recovery_timeout_seconds=0.0)) as shell:
        async with serving_executor(executor := ObedientExecutor(), shell.executor_address):
            router = await shell.welcomed()
            await router.submit(1, "r1", [1, 7], 100)
            await until(lambda: len(executor.plans) >= 3)
            executor.may_answer.clear()
        await until(lambda: 1 in router.finished)
        assert router.finished[1].status_code == UNAVAILABLE


# --- leaving ------------------------------------------------------------------------------------------


async def test_what_a_draining_executor_cannot_finish_moves_to_another_one(quick: Executors) -> None:
    def drain(result: executor_pb2.StepResult) -> executor_pb2.StepResult:
        result.draining, result.leaves_in_ms = True, 1
        return result

    leaving, other = ObedientExecutor(), ObedientExecutor()
    await quick.serve(leaving)
    router = await quick.shell.welcomed()
    await submit(router, 3, 90)
    await until(lambda: len(leaving.plans) >= 3)
    quick.expect("other")
    await quick.serve(other, "other")
    await quick.attached("other")
    leaving.change = drain
    await until(lambda: len(router.finished) == 3)
    assert all(right(router, handle, 90) for handle in range(1, 4))
    assert other.plans
    assert not quick.shell.core.executors[quick.address("executor")].running
    assert router.statuses[-1].serving
    assert quick.shell.core.counters.preemptions == 0


# --- another model ------------------------------------------------------------------------------------


def of_model(fingerprint: str, numerics: str = "") -> ObedientExecutor:
    executor = ObedientExecutor()

    def offer(response: executor_pb2.OpenResponse) -> None:
        response.fingerprints.model, response.fingerprints.numerics = fingerprint, numerics

    executor.offer = offer
    return executor


@pytest.mark.parametrize("other", [of_model("b"), of_model("a", "avx2")])
async def test_an_executor_with_another_model_or_numbers_does_not_serve_beside_others(
    quick: Executors, other: ObedientExecutor
) -> None:
    await quick.serve(of_model("a", "avx512"))
    router = await quick.shell.welcomed()
    quick.expect("other")
    await quick.serve(other, "other")
    await until(
        lambda: "does not fit the others" in quick.shell.scheduler.missing.get(quick.address("other"), "")
    )
    await router.submit(1, "r1", [1, 7], 5)
    await until(lambda: 1 in router.finished)
    assert not other.plans


async def test_an_executor_that_returns_alone_with_another_model_makes_routers_ask_anew(
    quick: Executors,
) -> None:
    first = await quick.serve(before := of_model("a"))
    router = await quick.shell.welcomed()
    await router.submit(1, "r1", [1, 7], 100)
    await until(lambda: len(before.plans) >= 3)
    before.may_answer.clear()
    await first.stop(0)
    await quick.serve(after := of_model("b"))
    await until(lambda: after.num_opened)
    await until(lambda: 1 in router.finished)  # it is not gone on with by another model
    assert router.finished[1].status_code == UNAVAILABLE
    assert {plan.epoch for plan in after.plans} <= {before.plans[0].epoch}  # sent again, and refused
    assert (await router.ended())[0] is grpc.StatusCode.UNAVAILABLE
    again = await quick.shell.welcomed()
    welcome = next(item.welcome for item in again.messages if item.HasField("welcome"))
    assert welcome.fingerprints.model == "b"


async def test_one_executor_under_two_addresses_is_attached_once(quick: Executors) -> None:
    executor = ObedientExecutor()
    await quick.serve(executor)
    await quick.shell.welcomed()
    await quick.serve(executor, "alias")
    quick.expect("alias")
    # Under which of them depends on what is seen first: the alias's Open, or that it ended the epoch before.
    scheduler, names = quick.shell.scheduler, {quick.address("executor"), quick.address("alias")}
    await until(lambda: any("same executor" in reason for reason in scheduler.missing.values()))
    await until(lambda: len(quick.shell.core.executors) == 1)
    assert {*scheduler.missing, *quick.shell.core.executors} == names


# --- a request that executors die of ------------------------------------------------------------------


class Mortal(ObedientExecutor):
    """Dies, state and all, of any plan with a row of a sequence whose prompt begins with 66."""

    def __init__(self) -> None:
        super().__init__()
        self.num_deaths = 0
        self.change = self._die_of_66

    def _die_of_66(self, result: executor_pb2.StepResult) -> executor_pb2.StepResult:
        if self.epoch is not None and any(
            self.epoch.sequences[seq_id].tokens[0] == 66
            for seq_id in result.seq_ids
            if seq_id in self.epoch.sequences
        ):
            self.num_deaths += 1
            self.epoch = None
            raise asyncio.CancelledError  # ends the call without a word of its own
        return result


async def test_a_poisonous_request_ends_and_everybody_else_is_right(quick: Executors) -> None:
    executor = Mortal()
    await quick.serve(executor)
    router = await quick.shell.welcomed()
    await submit(router, 3, 30)
    await until(lambda: len(executor.plans) >= 3)
    await router.submit(8, "poison", [66, 1], 30)
    for handle in range(4, 8):
        await router.submit(handle, f"r{handle}", [handle, 7], 30)
    await until(lambda: len(router.finished) == 8)
    assert router.finished[8].status_code == INTERNAL
    assert "'poison'" in router.finished[8].message
    assert all(right(router, handle, 30) for handle in range(1, 8))
    assert executor.num_deaths <= 5  # log2(8) + 2


async def test_two_choices_of_a_poisonous_request_are_found_together(quick: Executors) -> None:
    executor = Mortal()
    await quick.serve(executor)
    router = await quick.shell.welcomed()
    await submit(router, 2, 30)
    fields: dict[str, Any] = {"request_id": "poison"}
    await router.submit(8, "poison-0", [66, 1], 30, **fields)
    await router.submit(9, "poison-1", [66, 1], 30, sample_index=1, **fields)
    await until(lambda: len(router.finished) == 4)
    assert {router.finished[8].status_code, router.finished[9].status_code} == {INTERNAL}
    assert all(right(router, handle, 30) for handle in (1, 2))


# --- a request that executors answer wrongly, and an executor that answers wrongly ---------------------


class Liar(ObedientExecutor):
    """Answers wrongly each plan with a row of a sequence whose prompt begins with one of these ids."""

    def __init__(self, first_ids: Container[int]) -> None:
        super().__init__()
        self.first_ids = first_ids
        self.lies: set[int] = set()
        """Epochs."""
        self.change = self._lie

    def _lie(self, result: executor_pb2.StepResult) -> executor_pb2.StepResult:
        assert self.epoch is not None
        sequences = self.epoch.sequences
        if any(sequences[seq_id].tokens[0] in self.first_ids for seq_id in result.seq_ids):
            self.lies.add(result.epoch)
            result.token_ids.append(3)
        return result


ANY_ID = range(toy_executor.VOCAB)


async def test_a_request_that_is_always_answered_wrongly_ends_and_everybody_else_is_right(
    quick: Executors,
) -> None:
    executor = Liar({66})
    await quick.serve(executor)
    router = await quick.shell.welcomed()
    await submit(router, 3, 30)
    await until(lambda: len(executor.plans) >= 3)
    await router.submit(4, "odd", [66, 1], 30)
    await until(lambda: len(router.finished) == 4)
    assert router.finished[4].status_code == INTERNAL
    assert "'odd'" in router.finished[4].message
    assert all(right(router, handle, 30) for handle in (1, 2, 3))
    assert len(executor.lies) <= 4  # log2(4) + 2


async def test_a_request_that_is_alone_and_always_answered_wrongly_ends(quick: Executors) -> None:
    executor = Liar({66})
    await quick.serve(executor)
    router = await quick.shell.welcomed()
    await router.submit(1, "odd", [66, 1], 30)
    await until(lambda: 1 in router.finished)
    assert router.finished[1].status_code == INTERNAL
    assert len(executor.lies) == 2


async def test_an_executor_that_answers_everything_wrongly_is_fenced_and_no_request_is_to_blame(
    quick: Executors,
) -> None:
    liar, other = Liar(()), ObedientExecutor()
    await quick.serve(liar)
    await quick.serve(other, "other")
    quick.expect("other")
    await quick.attached("executor", "other")
    router = await quick.shell.welcomed()
    await submit(router, 6, 60)
    await until(lambda: len(liar.plans) >= 3)
    liar.first_ids = ANY_ID
    await until(lambda: len(router.finished) == 6)
    assert all(right(router, handle, 60) for handle in range(1, 7))
    missing = quick.shell.scheduler.missing
    await until(lambda: "is fenced until it answers rightly" in missing.get(quick.address("executor"), ""))
    assert router.statuses[-1].serving
    liar.first_ids = ()  # repaired
    await quick.attached("executor")


async def test_requests_do_not_wait_for_ever_for_a_fenced_executor(quick: Executors) -> None:
    executor = Liar(ANY_ID)
    await quick.serve(executor)
    router = await quick.shell.welcomed()
    await router.submit(1, "r1", [1, 7], 30)
    await until(lambda: 1 in router.finished)
    assert router.finished[1].status_code == UNAVAILABLE
    assert not router.statuses[-1].serving
    await until(lambda: "is fenced until it answers rightly" in router.statuses[-1].reason)
    clients = [plan for plan in executor.plans if any(new.token_ids[0] == 1 for new in plan.admitted)]
    assert len(clients) == 1  # it was computed once; afterwards only what nobody had asked for


async def test_a_fence_does_not_outlive_the_process(
    quick: Executors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_loop, "_backoff", lambda attempt, at_most=0.01: at_most)  # fenced for 30 s
    monkeypatch.setattr(executor_loop, "FENCE_LOOK_SECONDS", 0.01)
    server = await quick.serve(Liar(ANY_ID))
    router = await quick.shell.welcomed()
    await router.submit(1, "r1", [1, 7], 3)
    await until(lambda: "is fenced until it answers rightly" in router.statuses[-1].reason)
    await server.stop(0)
    await until(lambda: "waiting for an executor" in router.statuses[-1].reason)
    await quick.serve(ObedientExecutor())  # mended, and started again
    await quick.attached("executor")


async def test_an_executor_that_hangs_at_its_rehearsal_is_asked_again(quick: Executors) -> None:
    executor = Liar({1})
    await quick.serve(executor)
    router = await quick.shell.welcomed()
    executor.may_answer.clear()
    await router.submit(1, "r1", [1, 7], 3)
    await until(lambda: executor.plans)
    executor.may_answer.set()
    await until(lambda: executor.lies)
    executor.may_answer.clear()
    executor.first_ids = ()
    num_opened = executor.num_opened
    await until(lambda: executor.num_opened >= num_opened + 2)
    executor.may_answer.set()
    await quick.attached("executor")

"""Two schedulers, one lease, one executor: who is asked, and who answers.

The toy executor has terms as the contract wants them, so the old leader is stopped where it must be.
"""

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from rpc.address import Address
from rpc.errors import StartError
from scheduler.core import SchedulerCore
from scheduler.executor_client import ExecutorClient
from scheduler.leadership import Leadership
from scheduler.lease import Lease
from scheduler.lease_file import LeaseFile
from scheduler.policy import Limits
from scheduler.running_scheduler import RunningScheduler
from tests.scheduler.shell import (
    MAX_MESSAGE_BYTES,
    ObedientExecutor,
    Shell,
    expected_ids,
    serving_executor,
    until,
)

LEASE_SECONDS = 0.5


@contextlib.asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[tuple[Shell, Shell, ObedientExecutor]]:
    """The leader, its standby, and their executor."""
    executor = ObedientExecutor()
    async with contextlib.AsyncExitStack() as stack:
        shells = []
        for name in ("first", "second"):
            shell = Shell(folder, Limits(watermark=0.0), scheduler_id=name, lease_seconds=LEASE_SECONDS)
            shells.append(await stack.enter_async_context(shell))
            if name == "first":
                await stack.enter_async_context(serving_executor(executor, shell.executor_address))
                await until(lambda: shells[0].scheduler.is_serving)
        yield shells[0], shells[1], executor


async def test_a_standby_says_who_leads_and_welcomes_nobody(short_folder: Path) -> None:
    async with pair(short_folder) as (first, second, _):
        router = await second.connect()
        await until(lambda: router.statuses and router.statuses[-1].reason == "standby: first leads")
        assert not router.statuses[-1].serving
        leader = await first.welcomed()
        assert leader.messages[0].welcome.term == 1
        assert not any(message.HasField("welcome") for message in router.messages)


async def test_a_leader_that_leaves_hands_over_at_once_and_what_it_began_goes_on(short_folder: Path) -> None:
    async with pair(short_folder) as (first, second, executor):
        old, new = await first.welcomed(), await second.connect()
        executor.may_answer.clear()
        await old.submit(1, "a", [5, 6], 40)
        await until(lambda: executor.plans)
        executor.may_answer.set()
        await until(lambda: len(old.ids[1]) > 3)
        assert first.leadership is not None
        await first.leadership.drained()
        assert (await old.ended())[0] is grpc.StatusCode.UNAVAILABLE
        await until(lambda: new.is_welcome)
        assert new.messages[-1].serving_status.serving
        assert next(item.welcome.term for item in new.messages if item.HasField("welcome")) == 2
        await new.submit(1, "a", [5, 6], 40, output=old.ids[1], accepted_before=True)
        await until(lambda: 1 in new.finished)
        assert new.ids[1] == expected_ids([5, 6], 40)
        assert first.core.is_idle
        assert not first.scheduler.is_serving


async def test_without_a_standby_a_leader_that_leaves_ends_what_it_has(short_folder: Path) -> None:
    executor = ObedientExecutor()
    shell = Shell(short_folder, Limits(watermark=0.0), scheduler_id="only", lease_seconds=LEASE_SECONDS)
    async with serving_executor(executor, shell.executor_address), shell:
        router = await shell.welcomed()
        executor.may_answer.clear()
        await router.submit(1, "a", [5, 6], 40)
        await until(lambda: executor.plans)
        assert shell.leadership is not None
        draining = asyncio.create_task(shell.leadership.drained())
        executor.may_answer.set()
        await draining
        await until(lambda: 1 in router.finished)
        assert router.ids[1] == expected_ids([5, 6], 40)


async def test_a_leader_whose_executor_is_held_at_a_higher_term_steps_down_and_never_opens_it_in_reply(
    short_folder: Path,
) -> None:
    executor = ObedientExecutor()
    shell = Shell(short_folder, Limits(watermark=0.0), scheduler_id="old", lease_seconds=600.0)
    async with serving_executor(executor, shell.executor_address), shell:
        router = await shell.welcomed()
        executor.may_answer.clear()
        await router.submit(1, "a", [5, 6], 40)
        await until(lambda: executor.plans)
        address = Address.parse(shell.executor_address, field="executor")
        client = ExecutorClient(address, max_message_bytes=MAX_MESSAGE_BYTES)
        await client.open("new", 7)
        await client.close()
        executor.may_answer.set()
        assert (await router.ended())[0] is grpc.StatusCode.UNAVAILABLE
        await until(lambda: shell.scheduler.standing_by == "standby: new leads at term 7")
        assert not shell.scheduler.is_serving
        assert shell.core.is_idle
        assert executor.holder == "new"
        assert LeaseFile(short_folder / "lease").look()[1], "the lease is free for whoever may lead"
        assert executor.num_opened == 2


class HangingFile(LeaseFile):
    """One on a volume that hangs while it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_well = threading.Event()
        self.is_well.set()
        self.num_waiting = 0

    def is_mine(self) -> bool:
        self.num_waiting += 1
        self.is_well.wait()
        self.num_waiting -= 1
        return super().is_mine()


@contextlib.asynccontextmanager
async def leader_whose_volume_hangs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Shell, ObedientExecutor, HangingFile]]:
    executor, files = ObedientExecutor(), list[HangingFile]()

    def made(path: Path) -> HangingFile:
        files.append(HangingFile(path))
        return files[-1]

    monkeypatch.setattr("tests.scheduler.shell.LeaseFile", made)
    shell = Shell(folder, Limits(watermark=0.0), scheduler_id="old", lease_seconds=LEASE_SECONDS)
    async with serving_executor(executor, shell.executor_address), shell:
        await until(lambda: shell.scheduler.is_serving)
        files[0].is_well.clear()
        await until(lambda: files[0].num_waiting)
        try:
            yield shell, executor, files[0]
        finally:
            files[0].is_well.set()


async def test_a_leader_that_is_fenced_steps_down_though_its_volume_hangs(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leader_whose_volume_hangs(short_folder, monkeypatch) as (shell, _, file):
        assert shell.leadership is not None
        shell.leadership.fenced("new", 7)
        await until(lambda: shell.scheduler.standing_by == "standby: new leads at term 7")
        assert file.num_waiting, "it hangs still"


async def test_a_leader_whose_volume_hangs_drains(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.leadership.HAND_OVER_SECONDS", 0.05)
    async with leader_whose_volume_hangs(short_folder, monkeypatch) as (shell, _, file):
        assert shell.leadership is not None
        await asyncio.wait_for(shell.leadership.drained(), 20)
        assert not shell.scheduler.is_serving
        assert file.num_waiting, "it hangs still"


HANGING = """
import sys, threading
from scheduler.__main__ import main
from scheduler.lease_file import LeaseFile
def hang(self):
    print("hangs", flush=True)
    threading.Event().wait()
LeaseFile.look = hang
main()
"""


def test_a_scheduler_whose_volume_hangs_ends(short_folder: Path) -> None:
    flags = ("--executor", f"unix:{short_folder}/e", "--listen", f"unix:{short_folder}/s")
    lease = ("--lease", f"{short_folder}/lease", "--scheduler-id", "a")
    with subprocess.Popen(
        [sys.executable, "-c", HANGING, *flags, *lease], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert "hangs\n" in iter(process.stdout.readline, "")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


async def test_an_outage_of_the_volume_is_told_once_and_its_end_too(
    short_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(short_folder) as (_, second, _):
        await until(lambda: second.scheduler.standing_by == "standby: first leads")
        looks, is_away = 0, True
        look = LeaseFile.look

        def counted(self: LeaseFile) -> object:
            nonlocal looks
            looks += 1
            if is_away:
                raise OSError(28, "No space left on device")
            return look(self)

        monkeypatch.setattr(LeaseFile, "look", counted)
        await until(lambda: looks > 4)
        is_away = False
        await until(lambda: looks > 8)
    told = capsys.readouterr().out
    assert told.count("lease_out_of_reach") == 1
    assert told.count("lease_in_reach") == 1


async def test_a_leader_that_was_usurped_finds_it_out_by_itself(short_folder: Path) -> None:
    """Even when no executor tells it: none is attached here."""
    shell = Shell(short_folder, Limits(watermark=0.0), scheduler_id="old", lease_seconds=LEASE_SECONDS)
    async with shell:
        await until(lambda: not shell.scheduler.standing_by)
        usurper = LeaseFile(short_folder / "lease")
        record, _ = usurper.look()
        assert record is not None
        assert usurper.claim(type(record)(record.term + 1, "new", 1))
        await until(lambda: shell.scheduler.standing_by)
        await until(lambda: shell.scheduler.standing_by == "standby: new leads")
        usurper.let_go()
        await until(lambda: not shell.scheduler.standing_by)
        record = LeaseFile(short_folder / "lease").read()
        assert record is not None
        assert (record.term, record.holder) == (3, "old")


@pytest.mark.parametrize("path", ["missing/lease", "."])
async def test_a_lease_that_cannot_be_had_keeps_the_process_from_starting(
    short_folder: Path, path: str
) -> None:
    scheduler = RunningScheduler(SchedulerCore(Limits()), on_serving=lambda serving, reason: None)
    leadership = Leadership(Lease("a", 1.0), LeaseFile(short_folder / path), scheduler, lead_nothing)
    with pytest.raises(StartError, match=r"--lease: .*directory: "):
        await leadership.run()


async def test_a_lease_file_that_is_something_else_keeps_the_process_from_starting(
    short_folder: Path,
) -> None:
    (short_folder / "lease").write_text("[tenants]")
    scheduler = RunningScheduler(SchedulerCore(Limits()), on_serving=lambda serving, reason: None)
    leadership = Leadership(Lease("a", 1.0), LeaseFile(short_folder / "lease"), scheduler, lead_nothing)
    with pytest.raises(StartError, match="is no lease file: name a file that is the lease's alone"):
        await leadership.run()


async def lead_nothing(_: int) -> None:
    raise AssertionError("it leads")

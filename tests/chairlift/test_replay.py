"""`chairlift replay` at the command line, and the recorded load under other settings."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from chairlift import calibrate, replay
from chairlift.lab.loads import Load, fresh_prompt
from chairlift.lab.loop import Arrival, LogicalLoop
from chairlift.lab.replay import replay_file
from chairlift.lab.step_times import Linear
from chairlift.lab.what_if import fitted, modelled, recorded
from scheduler import recorder
from scheduler.batching import Batching
from scheduler.core import SchedulerCore
from scheduler.plan import Capacity
from scheduler.policy import Limits
from scheduler.recorder import Recorder, RecordingCore
from scheduler.sequence import FinishReason
from scheduler.waiting import Policy
from tests.chairlift.gone import NobodyReads

LOAD = Load(120, prompt="uniform:10,60", output="exponential:30", rate=12.0, max_tokens=200)
LIMITS = Limits(window=1)


class KilledError(Exception):
    """The scheduler is, in the midst of a load."""


def recorded_run(path: Path, seconds: float = math.inf) -> Path:
    """The first seconds of a run in logical time, in which some gave up and some had deadlines."""
    writer = Recorder(path, LIMITS, Batching.ITERATION)
    core = RecordingCore(writer, LIMITS, cache_secret=b"x")
    loop = LogicalLoop(core, [Capacity(100, 16, 8, 64, 1 << 20, 2, 1 << 31)], Linear(10_000, 100))

    def arrivals() -> Iterator[Arrival]:
        for index, arrival in enumerate(LOAD):
            if arrival.time > seconds:
                raise KilledError
            yield replace(
                arrival,
                gives_up=arrival.time + 0.1 if index % 10 == 0 else None,
                deadline=arrival.time + 1.0 if index % 10 == 1 else None,
            )

    with contextlib.suppress(KilledError):
        loop.run(arrivals())
    writer.close()
    return writer.path


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the whole load."""
    monkeypatch.setattr(recorder, "MAX_PENDING", 10**9)
    return recorded_run(tmp_path / "record")


def test_a_record_is_told_and_compared_under_other_settings(
    record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay.main([str(record)]) == 0
    told = capsys.readouterr().out
    assert "120 requests, 0 refused" in told
    assert "plans, all equal to those recorded" in told
    assert "what if" not in told
    assert replay.main([str(record), "--policy", "fair", "--max-num-seqs", "2", "--no-prefix-caching"]) == 0
    told = capsys.readouterr().out
    assert "what if" in told
    assert "0.0 % off in the median" in told


def test_the_model_of_a_record_is_the_record_where_step_times_are_exact(record: Path) -> None:
    report = replay_file(record)
    prices = fitted(report).prices
    was, again = recorded(report), modelled(report, prices, lambda limits: limits)
    assert was.requests == again.requests == 120
    assert was.first_token_p50 == pytest.approx(again.first_token_p50, rel=0.02)
    assert was.between_tokens_p99 == pytest.approx(again.between_tokens_p99, rel=0.02)
    assert was.total_mean == pytest.approx(again.total_mean, rel=0.02)
    assert was.output_tokens == pytest.approx(again.output_tokens, rel=0.02)
    assert sum(seen.reason is FinishReason.ABORT for seen in report.seen) > 3


def test_who_was_on_its_way_at_the_end_of_a_record_did_not_end_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_PENDING", 10**9)
    report = replay_file(recorded_run(tmp_path / "record", seconds=4.0))
    assert sum(seen.reason is None for seen in report.seen) > 5
    assert any(seen.first_token is None for seen in report.seen)
    was, again = recorded(report), modelled(report, fitted(report).prices, lambda limits: limits)
    assert was.in_time == again.in_time
    assert was.output_tokens == again.output_tokens
    assert was.first_token_p99 == pytest.approx(again.first_token_p99, rel=1e-3)
    assert was.total_mean == pytest.approx(again.total_mean, rel=1e-3)


def test_who_failed_did_not_end_in_time_in_the_model_either(record: Path) -> None:
    report = replay_file(record)
    failed = next(seen for seen in report.seen if seen.reason is FinishReason.STOP)
    failed.reason = FinishReason.ERROR
    was, again = recorded(report), modelled(report, fitted(report).prices, lambda limits: limits)
    assert was.in_time == again.in_time


def test_a_recording_that_ended_early_is_not_taken_for_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = Recorder(tmp_path / "record", LIMITS, Batching.ITERATION)
    core = RecordingCore(writer, LIMITS, cache_secret=b"x")
    LogicalLoop(core, [Capacity(100, 16, 8, 64, 1 << 20, 2, 1 << 31)], Linear(10_000, 100))
    writer.stop("the disk is slow")
    writer.close()
    assert replay.main([str(writer.path)]) == 0
    assert "the recording ended here, before its scheduler did: the disk is slow" in capsys.readouterr().out


def test_what_the_executor_did_not_have_is_not_modelled(
    record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag, most in (
        ("--max-num-seqs", 8),
        ("--max-num-batched-tokens", 64),
        ("--num-blocks", 100),
        ("--window", 2),
    ):
        assert replay.main([str(record), flag, str(most + 1)]) == 2
        told = f"{flag} is {most + 1}, and the recorded executors take {most} at most"
        assert told in capsys.readouterr().err
    assert replay.main([str(record), "--num-blocks", "1"]) == 1
    assert "under these settings every request is refused" in capsys.readouterr().err
    assert replay.main([str(record), "--max-queued", "0", "--max-num-seqs", "8"]) == 0


def test_a_reader_that_has_gone_is_no_fault_of_the_record(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", NobodyReads())
    for command, argv in ((replay, [str(record)]), (calibrate, ["--record", str(record)])):
        with pytest.raises(BrokenPipeError):
            command.main(argv)


def test_what_if_answers_what_it_is_asked(record: Path) -> None:
    report = replay_file(record)
    prices = fitted(report).prices
    was = modelled(report, prices, lambda limits: limits)
    narrow = modelled(report, prices, lambda limits: replace(limits, max_num_seqs=1))
    assert narrow.first_token_p50 > 2 * was.first_token_p50
    short = modelled(report, prices, lambda limits: replace(limits, max_queued=0))
    assert short.refused > 0
    urgent = modelled(report, prices, lambda limits: replace(limits, policy=Policy.DEADLINE))
    assert urgent.in_time >= was.in_time


def test_who_gives_up_in_logical_time_gets_no_more() -> None:
    core = SchedulerCore(LIMITS)
    loop = LogicalLoop(core, [Capacity(100, 16, 8, 64, 1 << 20, 2, 1 << 31)], Linear(10_000, 0))
    records = loop.run(
        [
            Arrival(0.0, fresh_prompt(1, 10), 50, 50, gives_up=0.1),
            Arrival(0.0, fresh_prompt(2, 10), 5, 5, gives_up=9.0),
        ]
    )
    assert records.ended[0] == pytest.approx(0.1)
    assert 8 <= records.num_output_tokens[0] <= 10
    assert list(records.in_time) == [0, 1]
    assert core.is_idle


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda data: data[:-5], "cut off in chunk"),
        (lambda data: data[:500] + bytes([data[500] ^ 1]) + data[501:], "is not as it was written"),
        (lambda _: b"arrival_s", "this is no record"),
    ],
)
def test_a_record_that_was_tampered_with_is_refused(
    record: Path, capsys: pytest.CaptureFixture[str], change: object, complaint: str
) -> None:
    record.write_bytes(change(record.read_bytes()))  # type: ignore[operator]
    assert replay.main([str(record)]) == 2
    assert complaint in capsys.readouterr().err


def test_flags_that_make_no_sense_and_files_that_are_not_there(
    record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay.main([str(record.with_name("absent"))]) == 2
    assert "absent" in capsys.readouterr().err
    for flags in (["--max-num-seqs", "0"], ["--max-step-ms", "nan"], ["--policy", "luck"]):
        with pytest.raises(SystemExit):
            replay.main([str(record), *flags])

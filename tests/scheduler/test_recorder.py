"""A record has everything that changes the core, no gap, and never holds the server up."""

import threading
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler import recorder as module
from scheduler.batching import Batching
from scheduler.core import SchedulerCore
from scheduler.policy import Limits
from scheduler.record_file import chunks
from scheduler.recorder import Recorder, RecordingCore
from scheduler.sequence import FinishReason, Request
from tests.rig.checking_executor import capacity

READS_ALONE = {"explain", "features", "has_sibling", "is_idle", "max_total_tokens", "next_timer",
               "num_free_seats", "num_running"}  # fmt: skip
# Called by the core's own parts, within calls that are recorded.
ITS_OWN = {"enter", "find_place", "hand_on", "note", "preempt", "see_who_takes_newcomers", "unpark_followers"}
LIMITS = Limits(window=1)


def request(number: int) -> Request:
    return Request(number.to_bytes(16), str(number), array("I", [1, 2, 3]), b"", 5)


def begun(path: Path) -> tuple[Recorder, RecordingCore]:
    recorder = Recorder(path, LIMITS, Batching.ITERATION)
    return recorder, RecordingCore(recorder, LIMITS)


def kinds(path: Path) -> list[str]:
    with path.open("rb") as file:
        lines = b"".join(chunk.lines for chunk in chunks(file)).splitlines()
    return [text.partition(b'"e":"')[2].partition(b'"')[0].decode() for text in lines[1:]]


def test_every_call_that_changes_the_core_is_recorded() -> None:
    public = {name for name in dir(SchedulerCore) if not name.startswith("_")}
    assert public - READS_ALONE - ITS_OWN == {
        name for name in vars(RecordingCore) if not name.startswith("_")
    }


def test_calls_are_written_in_their_order_and_those_of_the_core_itself_are_not(tmp_path: Path) -> None:
    recorder, core = begun(tmp_path / "r")
    core.attach("e", 1, capacity(), 0.0)
    seq = core.submit(request(1), now=1.0)
    core.submit(request(2), now=1.0)
    core.schedule("e", 1.0)
    core.orphan(seq, 2.0)
    core.cancel(seq.request.key, FinishReason.ABORT, 2.0)  # forgets it
    core.cancel(seq.request.key, FinishReason.ABORT, 2.0)  # nothing lives there
    core.expire(3.0)
    core.executors["e"].is_away = True
    core.schedule("e", 4.0)
    core.detach("e", 5.0)
    recorder.close()
    wanted = "attach submit submit schedule orphan cancel expire stream schedule detach"
    assert kinds(tmp_path / "r") == wanted.split()


def test_a_record_that_is_there_is_kept(tmp_path: Path) -> None:
    for _ in range(3):
        begun(tmp_path / "r")[0].close()
    assert sorted(item.name for item in tmp_path.iterdir()) == ["r", "r.2", "r.3"]


def test_a_file_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        begun(tmp_path / "absent" / "r")


def test_when_writing_stands_still_the_recording_ends_and_the_core_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_PENDING", 50)
    recorder, core = begun(tmp_path / "r")
    may_go_on = threading.Event()
    recorder.put(lambda _: {"e": "held"} if may_go_on.wait(60) else {})
    core.attach("e", 1, capacity(), 0.0)
    for number in range(1, 100):
        core.submit(request(number), now=float(number))
    assert not recorder.is_on
    assert len(core.sequences) == 99
    may_go_on.set()
    recorder.close()
    told = kinds(tmp_path / "r")
    assert told[:3] == ["held", "attach", "submit"]  # whole, as far as it goes
    assert told[-1] == "ended"


def test_a_file_that_hangs_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "close_seconds", 0.05)
    hangs = threading.Event()
    monkeypatch.setattr(Recorder, "_write_pending", lambda *_: hangs.wait())
    recorder, _ = begun(tmp_path / "record")
    recorder.close()
    assert not recorder.is_on
    hangs.set()
    recorder._thread.join()


def test_when_writing_fails_the_recording_ends_and_the_core_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> bytes:
        raise OSError("no space left on device")

    recorder, core = begun(tmp_path / "r")
    monkeypatch.setattr(module.Sealer, "seal", full)
    core.attach("e", 1, capacity(), 0.0)
    recorder.close()
    assert not recorder.is_on
    core.submit(request(1), now=1.0)


def test_blocks_that_cut_stretches_end_the_recording(tmp_path: Path) -> None:
    recorder, core = begun(tmp_path / "r")
    for name, size in (("a", 4), ("b", 8)):
        core.attach(name, 1, replace(capacity(), block_size=size), 0.0)
        assert recorder.is_on
    core.attach("c", 1, replace(capacity(), block_size=6), 0.0)
    assert not recorder.is_on
    recorder.close()
    assert kinds(tmp_path / "r") == ["attach", "attach", "ended"]


def test_what_cannot_be_encoded_ends_the_recording_and_the_record_says_so(tmp_path: Path) -> None:
    def cannot(_: object) -> dict[str, object]:
        raise module._EndedError("so it is")

    recorder, core = begun(tmp_path / "r")
    core.attach("e", 1, capacity(), 0.0)
    recorder.put(cannot)
    recorder.close()
    assert not recorder.is_on
    assert kinds(tmp_path / "r") == ["attach", "ended"]


def test_without_any_executor_the_record_is_whole(tmp_path: Path) -> None:
    recorder, core = begun(tmp_path / "r")
    core.submit(replace(request(1), accepted_before=True), now=1.0)
    recorder.close()
    assert kinds(tmp_path / "r") == ["submit"]

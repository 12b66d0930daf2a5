"""Prices of a scripted executor, whose step times are known; and what cannot be calibrated."""

import json
from pathlib import Path

import pytest

from chairlift import calibrate, simulate
from chairlift.calibrate import Shape, shapes
from chairlift.lab.loads import Load
from chairlift.lab.loop import LogicalLoop
from chairlift.lab.step_times import Linear, from_json
from protos.v1 import executor_pb2
from scheduler import recorder
from scheduler.batching import Batching
from scheduler.plan import Capacity
from scheduler.policy import Limits
from scheduler.recorder import Recorder, RecordingCore
from tests.rig import scripted_executor
from tests.rig.scripted_executor import Script

SMALL = Script(num_blocks=64, block_size=16, max_num_seqs=4, max_num_batched_tokens=64, max_seq_len=512)


def test_prices_of_a_running_executor_feed_a_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step takes 3 ms and 100 µs a token by its script; the rest is what the machine adds."""
    script = Script(
        num_blocks=256, max_num_seqs=16, max_num_batched_tokens=128, step_seconds=0.003, token_seconds=1e-4
    )
    out = tmp_path / "prices.json"
    with scripted_executor.running(script, tmp_path) as executor:
        assert calibrate.main([executor.address, "--out", str(out)]) == 0
    told = capsys.readouterr().err
    assert "% off in the median" in told
    assert "--num-blocks 256 --block-size 16 --max-num-seqs 16 --max-num-batched-tokens 128" in told
    prices = from_json(out)
    assert prices.base_us > 1000
    assert prices.per_token_us + prices.per_row_us > 10
    flags = ["--prompt", "20", "--output", "5", "--requests", "3", "--rate", "9", "--num-blocks", "256"]
    assert simulate.main(["--step-times", str(out), *flags]) == 0


def recorded(path: Path, prices: Linear, capacities: list[Capacity], num_requests: int) -> Path:
    """A load in logical time, written down."""
    limits = Limits(window=1, max_num_seqs=5)
    writer = Recorder(path, limits, Batching.ITERATION)
    core = RecordingCore(writer, limits, cache_secret=b"x")
    loop = LogicalLoop(core, capacities, prices)
    if num_requests:
        loop.run(Load(num_requests, prompt="uniform:10,60", output="exponential:30", rate=12.0))
    writer.close()
    return writer.path


def test_a_record_gives_the_prices_that_its_steps_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_PENDING", 10**9)
    capacity = Capacity(100, 16, 8, 64, 1 << 20, 2, 1 << 31)
    record = recorded(tmp_path / "record", Linear(10_000, 100), [capacity], 60)
    out = tmp_path / "prices.json"
    assert calibrate.main(["--record", str(record), "--out", str(out)]) == 0
    assert from_json(out).base_us == pytest.approx(10_000, rel=0.01)
    assert from_json(out).per_token_us == pytest.approx(100, rel=0.02)
    told = capsys.readouterr().err
    assert "--num-blocks 100 --block-size 16 --max-num-seqs 5 --max-num-batched-tokens 64" in told
    assert told.endswith("--window 1 --no-late-plans\n")  # as recorded, whatever the executor could take
    flags = told.splitlines()[-1].partition(str(out))[2].split()
    load = ["--prompt", "20", "--output", "5", "--requests", "3", "--rate", "9"]
    assert simulate.main(["--step-times", str(out), *flags, *load]) == 0


def test_the_whole_part_of_a_cut_record_gives_prices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_PENDING", 10**9)
    monkeypatch.setattr(recorder, "CHUNK_BYTES", 1 << 12)
    record = recorded(
        tmp_path / "record", Linear(10_000, 100), [Capacity(100, 16, 8, 64, 1 << 20, 2, 1 << 31)], 60
    )
    record.write_bytes(record.read_bytes()[:-5])
    assert calibrate.main(["--record", str(record)]) == 2
    assert "(--cut replays what is whole)" in capsys.readouterr().err
    assert calibrate.main(["--record", str(record), "--cut"]) == 0
    assert json.loads(capsys.readouterr().out)["base_us"] == pytest.approx(10_000, rel=0.01)
    with pytest.raises(SystemExit):
        calibrate.main(["127.0.0.1:1", "--cut"])
    assert "--cut without --record" in capsys.readouterr().err


def test_a_record_that_has_no_steps_or_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = recorded(tmp_path / "record", Linear(10_000, 100), [], 0)
    assert calibrate.main(["--record", str(nothing)]) == 2
    assert "no executor was there when it was recorded" in capsys.readouterr().err
    nothing.write_text("{}")
    assert calibrate.main(["--record", str(nothing)]) == 2
    for argv in ([], ["127.0.0.1:1", "--record", str(nothing)]):
        with pytest.raises(SystemExit):
            calibrate.main(argv)


def test_a_record_needs_no_certificates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        calibrate.main(["--record", str(tmp_path / "record"), "--tls-ca", "ca.pem", "--tls-server-name", "e"])
    assert "--tls-ca, --tls-server-name with --record" in capsys.readouterr().err


def test_what_the_environment_says_of_certificates_is_for_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHAIRLIFT_TLS_CA", "ca.pem")
    nothing = recorded(tmp_path / "record", Linear(10_000, 100), [], 0)
    assert calibrate.main(["--record", str(nothing)]) == 2
    assert "no executor was there" in capsys.readouterr().err


def test_one_after_the_other_and_the_executor_is_free_again(tmp_path: Path) -> None:
    with scripted_executor.running(SMALL, tmp_path) as executor:
        for name in ("one", "two"):
            assert calibrate.main([executor.address, "--out", str(tmp_path / name)]) == 0
            assert set(json.loads((tmp_path / name).read_text())) >= {"base_us", "per_token_us"}


def test_where_nobody_answers_or_the_address_is_none_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate.main(["unix:/nowhere/at.sock"]) == 2
    assert "the executor at unix:/nowhere/at.sock cannot be opened" in capsys.readouterr().err
    assert calibrate.main(["nowhere"]) == 2
    assert "ADDRESS" in capsys.readouterr().err


def test_shapes_are_those_that_the_executor_can_take() -> None:
    capacity = executor_pb2.OpenResponse(
        num_blocks=64, block_size=16, max_num_seqs=4, max_num_batched_tokens=20, max_seq_len=300
    )
    wanted = shapes(capacity)
    assert Shape(4, 128) in wanted
    assert Shape(1, 128, 16) in wanted
    assert not any(shape.num_seqs > 4 or shape.context > 300 or shape.chunk > 16 for shape in wanted)
    capacity.num_blocks = 1
    assert shapes(capacity) == []

import socket
from pathlib import Path

import pytest

from rpc.errors import StartError
from rpc.settings import load
from scheduler.batching import Batching
from scheduler.config import SchedulerSettings, read_tenants
from scheduler.tenants import TenantLimits


def settings(*flags: str) -> SchedulerSettings:
    return load(SchedulerSettings, ["--executor", "unix:/tmp/e.sock", *flags], prog="chairlift scheduler")


def test_what_is_not_said_is_left_to_the_executor() -> None:
    limits = settings().limits
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.num_blocks) == (None, None, None)
    assert (limits.max_step_us, limits.window, limits.watermark) == (None, 2, 0.01)
    assert settings().batching is Batching.ITERATION


def test_what_is_said_reaches_the_core() -> None:
    limits = settings(
        "--max-num-seqs", "4", "--max-num-batched-tokens", "256", "--max-step-ms", "12.5",
        "--num-blocks", "99", "--window", "1", "--watermark", "0.25", "--orphan-grace-seconds", "3",
    ).limits  # fmt: skip
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.num_blocks) == (4, 256, 99)
    assert (limits.max_step_us, limits.window, limits.watermark) == (12_500, 1, 0.25)
    assert limits.orphan_grace_seconds == 3


@pytest.mark.parametrize("value", ["iteration", "request", "request-padded"])
def test_batching_is_said_in_words(value: str) -> None:
    assert settings("--batching", value).batching.value == value


def test_executors_are_addresses() -> None:
    both = load(SchedulerSettings, ["--executor", "10.0.0.1:5,dns:///executors:50053"], prog="p")
    assert [str(address) for address in both.executor_addresses] == ["10.0.0.1:5", "dns:///executors:50053"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--executor", "nonsense"], "--executor"),
        (["--executor", "a:1,a:1"], "twice"),
        (["--max-num-seqs", "0"], "--max-num-seqs is 0: it must be at least 1"),
        (["--max-num-batched-tokens", "0"], "--max-num-batched-tokens is 0"),
        (["--max-step-ms", "0"], "more than 0"),
        (["--num-blocks", "0"], "--num-blocks"),
        (["--window", "3"], "at most 2"),
        (["--watermark", "1"], "less than 1"),
        (["--batching", "sometimes"], "sometimes"),
        (["--policy", "sometimes"], "--policy is .?sometimes"),
        (["--admission", "sometimes"], "--admission is .?sometimes"),
        (["--aging-seconds", "0"], "--aging-seconds"),
        (["--reattach-seconds", "-1"], "at least 0"),
        (["--scheduler-id", "a\tb"], "--scheduler-id is a\tb: it must consist of printable characters"),
    ],
)
def test_b38_what_cannot_be_is_told_with_flag_value_and_limit(flags: list[str], sentence: str) -> None:
    with pytest.raises(StartError, match=sentence):
        settings(*flags)


def test_an_executor_must_be_named() -> None:
    with pytest.raises(StartError, match="--executor is missing"):
        load(SchedulerSettings, [], prog="p")


def test_a_scheduler_is_named_after_where_it_listens_unless_it_is_told() -> None:
    assert settings("--listen", "10.0.0.9:7").name == f"{socket.gethostname()}/10.0.0.9:7"
    assert settings("--scheduler-id", "blue").name == "blue"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[t]\nweight = 0", r"\[t\] weight is 0: it must be more than 0"),
        ("[t]\nweight = -1.5", r"\[t\] weight is -1.5: it must be more than 0"),
        (
            "[t]\nmax_block = 3",
            r"\[t\] has max_block, which is none of: keys, best_priority, admin, weight, ",
        ),
        ("[t]\nkyes = []", r"\[t\] has kyes, which is none of: keys, best_priority, admin, weight, "),
        ("[t]\nmax_blocks = true", "must be a number"),
        ("weight = 2", "weight is no table"),
        ("[t", "cannot be read as TOML"),
    ],
)
def test_a_tenants_file_that_cannot_be_is_told_by_table_and_name(
    tmp_path: Path, text: str, sentence: str
) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    with pytest.raises(StartError, match=sentence):
        settings("--tenants", str(path))


def test_a_tenants_file_that_is_not_there_is_told_so(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "nope.toml", "no such file or directory"), (tmp_path, "is a directory")):
        with pytest.raises(StartError, match=f"^--tenants is {path}: {why}$"):
            settings("--tenants", str(path))


def test_what_routers_read_in_the_tenants_file_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(
        '[acme]\nkeys = ["sha256:00"]\nbest_priority = -10\nadmin = true\nweight = 2\n[bare]\nadmin = false\n'
    )
    assert read_tenants(str(path)) == {"acme": TenantLimits(weight=2), "bare": TenantLimits()}

"""The lease file, between processes of one machine."""

import fcntl
import os
from pathlib import Path

import pytest

from scheduler.lease import Record
from scheduler.lease_file import LeaseFile, LeaseFileError

FIRST = Record(1, "a", 1)


def test_the_first_to_look_finds_it_free_and_has_it_locked(tmp_path: Path) -> None:
    one, other = LeaseFile(tmp_path / "lease"), LeaseFile(tmp_path / "lease")
    assert one.look() == (None, True)
    assert other.look() == (None, False)
    assert one.claim(FIRST)
    assert other.look() == (FIRST, False)
    one.write(Record(1, "a", 2))
    assert other.look() == (Record(1, "a", 2), False)
    assert other.read() == Record(1, "a", 2)


def test_what_its_leader_lets_go_is_free_with_what_it_said(tmp_path: Path) -> None:
    one, other = LeaseFile(tmp_path / "lease"), LeaseFile(tmp_path / "lease")
    one.look()
    one.claim(FIRST)
    one.let_go()
    assert other.look() == (FIRST, True)


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        child = LeaseFile(tmp_path / "lease")
        child.look()
        child.claim(FIRST)
        os._exit(0)
    os.waitpid(pid, 0)
    assert LeaseFile(tmp_path / "lease").look() == (FIRST, True)


def test_a_usurped_leader_finds_that_the_file_is_not_its_own(tmp_path: Path) -> None:
    frozen, other, third = (LeaseFile(tmp_path / "lease") for _ in range(3))
    frozen.look()
    frozen.claim(FIRST)
    assert other.look() == (FIRST, False)
    assert other.claim(Record(2, "b", 1))
    assert not frozen.is_mine()
    assert other.is_mine()
    frozen.write(Record(1, "a", 2))  # too late: it writes where nobody looks
    assert third.look() == (Record(2, "b", 1), False)
    assert [path.name for path in tmp_path.iterdir()] == ["lease"]


def test_of_two_who_usurp_at_once_one_alone_has_the_term(tmp_path: Path) -> None:
    frozen, one, other = (LeaseFile(tmp_path / "lease") for _ in range(3))
    frozen.look()
    frozen.claim(FIRST)
    assert one.claim(Record(2, "b", 1))
    assert not other.claim(Record(2, "c", 1))
    assert one.is_mine()
    assert one.read() == Record(2, "b", 1)
    assert other.claim(Record(3, "c", 1)), "should that one freeze as well"
    assert not one.is_mine()
    assert [path.name for path in tmp_path.iterdir()] == ["lease"]


def test_who_is_about_to_usurp_is_not_disturbed_and_who_died_of_it_is_no_obstacle(tmp_path: Path) -> None:
    frozen, other = LeaseFile(tmp_path / "lease"), LeaseFile(tmp_path / "lease")
    frozen.look()
    frozen.claim(FIRST)
    with (tmp_path / "lease.next").open("wb") as of_another:
        fcntl.flock(of_another, fcntl.LOCK_EX)
        assert not other.claim(Record(2, "c", 1))
        assert frozen.is_mine()
    assert other.claim(Record(2, "c", 1))


def test_a_file_that_was_taken_away_is_nobodys(tmp_path: Path) -> None:
    lease = LeaseFile(tmp_path / "lease")
    lease.look()
    lease.claim(FIRST)
    (tmp_path / "lease").unlink()
    assert not lease.is_mine()
    assert lease.read() is None


@pytest.mark.parametrize("content", ["[tenants]\n", "{}", '{"term": 1}', "[]"])
def test_a_file_of_somebody_else_is_refused_and_left_as_it_is(tmp_path: Path, content: str) -> None:
    path = tmp_path / "lease"
    path.write_text(content)
    lease = LeaseFile(path)
    with pytest.raises(LeaseFileError, match="is no lease file"):
        lease.look()
    assert path.read_text() == content

"""Where a process stands among the ranks."""

from pathlib import Path

import pytest

from executor.parallel.place import Place, environment_of, place_of
from rpc.errors import StartError

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def test_nobody_asked_for_ranks() -> None:
    for place in (place_of(None, {}), place_of(1, {"HOME": "/"}), place_of(1, {"RANK": "0"})):
        assert place == Place()
        assert not place.starts_others


def test_the_flag_makes_a_first_rank_that_starts_the_others() -> None:
    place = place_of(4, {})
    assert (place.rank, place.size, place.local_size, place.starts_others) == (0, 4, 4, True)


def test_a_rank_that_the_first_one_started_meets_it_and_ends_with_it() -> None:
    place = place_of(4, environment_of(2, 4, "file:///there/meeting"))
    assert place == Place(2, 4, 2, 4, "file:///there/meeting", is_guarded=True)
    assert place.meeting_folder == Path("/there")
    assert not place.starts_others


@pytest.mark.parametrize("flag", [None, 8])
def test_torchrun_says_who_and_where(flag: int | None) -> None:
    place = place_of(flag, TORCHRUN)
    assert place == Place(5, 8, 1, 4, "env://")
    assert not place.starts_others


def test_plain_variables_count_the_machine_as_all_there_is() -> None:
    assert place_of(None, {"RANK": "1", "WORLD_SIZE": "2"}) == Place(1, 2, 1, 2, "env://")


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"RANK": "8"}, "RANK is 8: it must be below WORLD_SIZE, 8"),
        ({"RANK": "x"}, "RANK is 'x': it must be a whole number of at least 0"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0': it must be a whole number of at least 1"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1'"),
    ],
)
def test_variables_that_cannot_be_are_refused(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(StartError, match=sentence):
        place_of(None, TORCHRUN | environ)


def test_flag_and_torchrun_must_not_contradict_each_other() -> None:
    with pytest.raises(StartError, match=r"--tensor-parallel is 2, and .* started 8 ranks"):
        place_of(2, TORCHRUN)

"""Long files begin, a file is whole unless it is divided, and what is written is of files that are."""

from pathlib import Path

import pytest

from tests.rig import distribution
from tests.rig.distribution import Queue, unit_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distribution, "SECONDS", {"long.py": 50, "longer.py": 60})
    monkeypatch.setattr(distribution, "DIVIDED", frozenset({"longer.py"}))


def test_a_file_is_one_unit_unless_it_is_divided(known: None) -> None:
    assert unit_of("tests/a.py::Class::test[b::c]") == "tests/a.py"
    assert unit_of("longer.py::test[1]") == "longer.py::test[1]"


def test_the_longest_are_taken_first_and_the_others_in_the_order_in_which_they_came(known: None) -> None:
    queue = Queue()
    for unit in ("b.py", "a.py", "long.py", "longer.py::test[1]", "longer.py::test[2]"):
        queue[unit] = {unit: False}
    taken = [queue.popitem(last=False) for _ in range(len(queue))]
    assert [unit for unit, _ in taken] == [
        "longer.py::test[1]",
        "longer.py::test[2]",
        "long.py",
        "b.py",
        "a.py",
    ]
    assert all(tests == {unit: False} for unit, tests in taken)


def test_what_is_written_down_is_of_files_that_are() -> None:
    assert [file for file in distribution.SECONDS if not (ROOT / file).is_file()] == []
    assert distribution.SECONDS.keys() >= distribution.DIVIDED

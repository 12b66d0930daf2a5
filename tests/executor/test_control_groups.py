"""Folders of a test as control groups."""

from pathlib import Path

import pytest

from executor import control_groups


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/old\n0::/service/executor\n")
    return tmp_path / "proc"


def write_group(group: Path, **files: str) -> None:
    group.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (group / name.replace("_", ".")).write_text(text)


def write_memory(group: Path, limit: str, used: int, unused_pages: int) -> None:
    stat = f"anon {used - unused_pages}\ninactive_file {unused_pages}\n"
    write_group(group, memory_max=f"{limit}\n", memory_current=f"{used}\n", memory_stat=stat)


def test_the_groups_are_the_own_one_and_its_ancestors(tmp_path: Path, proc: Path) -> None:
    own, parent, root, *_ = control_groups.own_groups(proc, tmp_path / "groups")
    assert (own.name, parent.name, root) == ("executor", "service", tmp_path / "groups")


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path, proc: Path) -> None:
    (proc / "self/cgroup").write_text("0::/\n")
    assert control_groups.own_groups(proc, tmp_path / "groups")[0] == tmp_path / "groups"


def test_without_control_groups_nothing_is_limited(tmp_path: Path, proc: Path) -> None:
    assert control_groups.own_groups(tmp_path / "elsewhere") == ()
    groups = control_groups.own_groups(proc, tmp_path / "groups")
    assert [*control_groups.bytes_left(groups), *control_groups.processors(groups)] == []


def test_a_group_leaves_its_limit_less_what_is_in_use_and_not_its_pages_of_files(tmp_path: Path) -> None:
    write_memory(tmp_path / "own", "max", used=5000, unused_pages=0)
    write_memory(tmp_path / "parent", "6000", used=5000, unused_pages=4000)
    write_memory(tmp_path / "full", "1000", used=5000, unused_pages=0)
    groups = (tmp_path / "own", tmp_path / "parent", tmp_path / "full")
    assert list(control_groups.bytes_left(groups)) == [5000, 0]


def test_processors_are_whole_ones_and_one_at_least(tmp_path: Path) -> None:
    for name, limit in (("none", "max 100000"), ("some", "250000 100000"), ("little", "50000 100000")):
        write_group(tmp_path / name, cpu_max=f"{limit}\n")
    groups = (tmp_path / "none", tmp_path / "some", tmp_path / "little", tmp_path / "no_group")
    assert list(control_groups.processors(groups)) == [2, 1]

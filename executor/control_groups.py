"""What the control groups of this process let it use: the limits that containers and services are given.

These are control groups of version 2, each a folder of small files. A process is in one group, and the limits
of that group's ancestors hold for it as well. Knows no model, no tensor and no machine.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path


def own_groups(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> tuple[Path, ...]:
    """Where this process's group and its ancestors are. Some of the folders may be none of theirs."""
    try:
        lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ()
    line = next((line for line in lines if line.startswith("0::")), "")
    own = groups / line.removeprefix("0::").lstrip("/")
    return (own, *own.parents)


def bytes_left(groups: Iterable[Path]) -> Iterator[int]:
    """Memory that each of the groups leaves that has a limit.

    Pages of files count as a group's as well, those of a model just read for one; the ones that nobody uses
    are taken back when memory is wanted.
    """
    for group in groups:
        try:
            limit = (group / "memory.max").read_text(encoding="ascii").strip()
            used = int((group / "memory.current").read_text(encoding="ascii"))
            columns = (group / "memory.stat").read_text(encoding="ascii").split()
        except OSError:
            continue
        if limit != "max":
            unused_pages = int(columns[columns.index("inactive_file") + 1])
            yield max(0, int(limit) - max(0, used - unused_pages))


def processors(groups: Iterable[Path]) -> Iterator[int]:
    """How many processors each of the groups that has a limit may keep busy all the time; at least one.

    More threads than that are all stopped together, again and again, for most of a tenth of a second.
    """
    for group in groups:
        try:
            quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
        except OSError:
            continue
        if quota != "max":
            yield max(1, int(quota) // int(period))

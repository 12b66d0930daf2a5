"""Which rank of its executor a process is, and how it finds the others. No torch, no process.

There are three cases:

- nobody asked for several ranks: this one is alone.
- `--tensor-parallel N`: this is the first rank; it starts the others on this machine and they meet at a file.
- somebody else started all ranks, with the variables that `torchrun` sets (`RANK`, `WORLD_SIZE`,
  `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`): they may be on several machines, and meet
  at that address.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rpc.errors import StartError

FILE_SCHEME: Final = "file://"
MEETING: Final = "EXECUTOR_MEETING"
"""Variable of ranks that the first one started: where they meet."""


@dataclass(frozen=True, slots=True)
class Place:
    """One rank.

    Attributes:
        rank: 0 is the first one, which speaks gRPC.
        size: how many there are.
        local_rank: the same, counted on this machine.
        local_size: how many are on this machine.
        meeting: where they meet, as a URL for torch; "" when the others are still to be started.
        is_guarded: stdin is a pipe that ends when the first rank does.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    meeting: str = ""
    is_guarded: bool = False

    @property
    def starts_others(self) -> bool:
        """Whether this rank is to start the others."""
        return self.size > 1 and not self.meeting

    @property
    def meeting_folder(self) -> Path:
        """Of the file at which ranks meet that the first one started."""
        return Path(self.meeting.removeprefix(FILE_SCHEME)).parent


def place_of(tensor_parallel: int | None, environ: Mapping[str, str]) -> Place:
    """This process's place. Raises StartError when flag and environment contradict each other."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        size = tensor_parallel or 1
        return Place(size=size, local_size=size)
    rank, size = _number(environ, "RANK", 0), _number(environ, "WORLD_SIZE", 1)
    if rank >= size:
        raise StartError(f"the environment variable RANK is {rank}: it must be below WORLD_SIZE, {size}")
    if tensor_parallel not in {None, size}:
        raise StartError(
            f"--tensor-parallel is {tensor_parallel}, and whoever started this process started {size} ranks "
            "(WORLD_SIZE): leave the flag out, or make the numbers equal"
        )
    local_rank = _number(environ, "LOCAL_RANK", 0, default=rank)
    local_size = _number(environ, "LOCAL_WORLD_SIZE", 1, default=size)
    meeting = environ.get(MEETING)
    return Place(rank, size, local_rank, local_size, meeting or "env://", is_guarded=meeting is not None)


def environment_of(rank: int, size: int, meeting: str) -> dict[str, str]:
    """The variables of a rank that the first one starts."""
    here = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    return {name: str(value) for name, value in here.items()} | {MEETING: meeting}


def _number(environ: Mapping[str, str], name: str, least: int, default: int | None = None) -> int:
    value = environ.get(name, None if default is None else str(default))
    if value is None or not value.isdecimal() or int(value) < least:
        raise StartError(
            f"the environment variable {name} is {value!r}: it must be a whole number of at least {least}"
        )
    return int(value)

"""An hour of mixed traffic, with clients that leave, processes that die, freezes and cuts: nothing grows.

pytest -m soak tests/integration/test_soak.py --soak-minutes 5
"""

import itertools
import os
import statistics
import time
from collections import defaultdict
from pathlib import Path

import pytest

from tests.integration.test_chaos import check, questions
from tests.rig.chaos import ROUTERS, SCHEDULERS, Chaos, chaos

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SAMPLES_TO_WARM_UP = 0.3
"""This share of the run fills caches, pools and allocators."""
MAX_GROWTH_BYTES = 24 << 20
MAX_GROWTH_FDS = 8


def size_of(pid: int) -> tuple[int, int]:
    """Resident bytes and open file descriptors of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * PAGE_BYTES, len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.soak
@pytest.mark.timeout(0)
async def test_nothing_grows_however_long_it_runs(
    tiny_model_folder: Path, pytestconfig: pytest.Config
) -> None:
    seconds = 60 * float(pytestconfig.getoption("--soak-minutes"))
    asked = questions(32, max_tokens=80)
    flags = ("--num-blocks", "128", "--max-num-seqs", "12")
    async with chaos(tiny_model_folder, asked, num_executors=2, executor_flags=flags) as one:
        leader = await one.leader()
        (standby,) = set(SCHEDULERS) - {leader}
        samples: dict[str, list[tuple[int, int]]] = defaultdict(list)
        stays = {name: one.cluster.process(name).pid for name in (leader, ROUTERS[0], "executor0")}
        end = time.monotonic() + seconds
        async with one.load(16, at_least=100, leaving=0.2) as tally:
            for turn in itertools.count():
                await one.progress(20)
                await disturb(one, turn, standby)
                for name, pid in stays.items():
                    samples[name].append(size_of(pid))
                if time.monotonic() >= end:
                    break
        check(tally)
        assert "epoch_given_up" not in one.cluster.process(leader).stderr, "the audit found something"
    for name, sizes in samples.items():
        warm = sizes[int(len(sizes) * SAMPLES_TO_WARM_UP) :]
        third = max(1, len(warm) // 3)
        for column, most in ((0, MAX_GROWTH_BYTES), (1, MAX_GROWTH_FDS)):
            first, last = (
                statistics.median(size[column] for size in part) for part in (warm[:third], warm[-third:])
            )
            assert last - first <= most, (
                f"{name} grows from {first} to {last}: {[size[column] for size in sizes]}"
            )


async def disturb(one: Chaos, turn: int, standby: str) -> None:
    """What goes wrong in this turn; the leader, one router and one executor live through all of it."""
    match turn % 6:
        case 0:
            one.ways["executor0"].cut()
        case 1:
            await one.crash("executor1")
        case 2:
            await one.freeze("executor1", 0.5)
        case 3:
            await one.crash(ROUTERS[1])
        case 4:
            await one.crash(standby)
        case 5:
            await one.freeze(ROUTERS[0], 0.5)

"""Ways to hold KV memory differ in what they are named for, and lose nothing."""

from dataclasses import replace

import pytest

from chairlift.lab.kv_policies import ContiguousCore
from chairlift.lab.loads import Load, Row
from chairlift.lab.loop import Step
from chairlift.lab.run import Setup, served, simulate
from chairlift.lab.step_times import Linear
from scheduler.core import SchedulerCore
from scheduler.executor_state import ExecutorState
from scheduler.policy import Admission, Limits
from scheduler.sequence import Sequence

SETUP = Setup(
    Linear(10_000, 100), 64, block_size=4, max_num_seqs=16, max_num_batched_tokens=64, max_seq_len=128,
    limits=Limits(window=1),
)  # fmt: skip
LOAD = Load(80, prompt="uniform:5,40", output="uniform:1,40", arrivals="poisson", rate=30.0, max_tokens=40)
CONTIGUOUS = ("contiguous", "contiguous-buddy", "orca-max-buddy", "orca-pow2-buddy", "orca-oracle-buddy")


@pytest.mark.parametrize("name", CONTIGUOUS)
def test_runs_are_held_from_entry_to_end_and_hold_all_that_is_computed(name: str) -> None:
    def look(step: Step) -> None:
        needed.append(sum(seq.max_len for seq in step.state.running.values()))

    needed: list[int] = []
    loop = served(SETUP, LOAD, name, on_step=look)
    core = loop.core
    assert isinstance(core, ContiguousCore)
    assert core.counters.preemptions == 0
    assert core.num_held(core.executors["executor-0"]) == 0
    assert 0.5 * SETUP.max_len < max(needed) <= 64 * 4
    assert loop.totals.filled_slot_seconds < loop.totals.held_slot_seconds


def test_pages_hold_more_sequences_than_runs_and_a_buddy_fewest() -> None:
    names = ("contiguous-buddy", "contiguous", "paged")
    figures = {name: simulate(SETUP, replace(LOAD, arrivals="at-once"), name) for name in names}
    running = [figures[name].mean_running for name in names]
    assert running == sorted(running)
    filled = [figures[name].kv_filled_share for name in names]
    assert filled == sorted(filled)
    assert filled[-1] > 0.75
    assert all(item.kv_held_share <= 1 for item in figures.values())


def test_what_is_found_again_is_found_in_pages_that_are_kept() -> None:
    rows = tuple(Row(0.0, 100, 10, (index % 3,)) for index in range(12))
    load = Load(60, rows=rows, arrivals="poisson", rate=5.0)
    shares = {
        name: simulate(SETUP, load, name).prefix_hit_share for name in ("chairlift", "paged", "contiguous")
    }
    assert shares["chairlift"] > 0.25
    assert shares["paged"] == shares["contiguous"] == 0


def test_by_order_the_last_who_came_goes_and_by_cost_the_cheapest(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(
        60, prompt="uniform:4,60", output="uniform:20,60", arrivals="poisson", rate=20.0, max_tokens=60
    )
    setup = replace(SETUP, limits=Limits(window=1, admission=Admission.OPTIMISTIC, prefix_caching=False))
    chosen: dict[str, list[tuple[bool, bool]]] = {}

    def note(core: SchedulerCore, state: ExecutorState, seq: Sequence, why: str) -> None:
        candidates = [other for other in state.running.values() if other.has_progressed]
        is_last = seq.order == max(other.order for other in candidates)
        is_cheapest = seq.num_computed_tokens == min(other.num_computed_tokens for other in candidates)
        chosen.setdefault(type(core).__name__, []).append((is_last, is_cheapest))
        preempt(core, state, seq, why)

    preempt = SchedulerCore.preempt
    monkeypatch.setattr(SchedulerCore, "preempt", note)
    tokens = {simulate(setup, load, name).output_tokens for name in ("chairlift", "victims-by-order")}
    assert len(tokens) == 1
    assert len(chosen["SchedulerCore"]) > 5
    assert len(chosen["VictimsByOrderCore"]) > 5
    assert all(cheapest for _, cheapest in chosen["SchedulerCore"])
    assert all(last for last, _ in chosen["VictimsByOrderCore"])
    assert not all(last for last, _ in chosen["SchedulerCore"])


def test_what_no_run_is_long_enough_for_is_refused() -> None:
    setup = replace(SETUP, num_blocks=24)  # 96 slots: the longest buddy has 64
    load = Load(2, prompt="50", output="20", arrivals="at-once")
    assert simulate(setup, load, "contiguous-buddy").refused == 2
    assert simulate(setup, load, "contiguous").refused == 0

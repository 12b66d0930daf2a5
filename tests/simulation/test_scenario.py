"""Hundreds of worlds, each with its own shape, requests, delays, cuts and crashes; no law may break in any.

A seed that fails prints the end of its trace; `python -m tests.simulation SEED` shows all of it.
"""

import os
import subprocess
import sys
from array import array
from collections import Counter

import pytest

from scheduler import blocks, executor_session, router_session
from scheduler.plan import BatchPlan
from scheduler.sequence import Sequence
from tests.simulation.scenario import Scenario
from tests.simulation.world import SimulationError

SEEDS_A_TEST = 25


def run(seed: int) -> Scenario:
    scenario = Scenario(seed)
    scenario.run()
    return scenario


@pytest.mark.parametrize("first", range(0, 300, SEEDS_A_TEST))
def test_no_law_breaks_whatever_is_cut_or_crashes(first: int) -> None:
    for seed in range(first, first + SEEDS_A_TEST):
        run(seed)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1_000, 31_000, 1_000))
def test_no_law_breaks_in_many_more_worlds(first: int) -> None:
    for seed in range(first, first + 1_000):
        run(seed)


def test_the_worlds_meet_what_they_are_made_for() -> None:
    met: Counter[str] = Counter()
    for seed in range(60):
        scenario = run(seed)
        trace = "\n".join(scenario.world.trace)
        met["preemption"] += scenario.scheduler.core.counters.preemptions
        met["kept result"] += trace.count("is answered again")
        met["lost executor"] += trace.count("has lost")
        met["resubmission with ids"] += trace.count("comes with") - trace.count("comes with 0 ids")
        met["crash of a scheduler"] += trace.count("scheduler    crashes")
        for reason in ("STOP", "LENGTH", "ABORT", "DEADLINE"):
            met[reason] += trace.count(f"ends: {reason}")
    assert all(met.values()), met


def test_the_same_seed_gives_the_same_trace() -> None:
    first, again = run(3), run(3)
    assert first.world.trace == again.world.trace


def test_a_trace_does_not_depend_on_the_process() -> None:
    command = [sys.executable, "-m", "tests.simulation", "3"]
    env = os.environ | {"PYTHONHASHSEED": "77"}
    output = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == f"digest {run(3).world.digest}"


def test_another_seed_is_another_world() -> None:
    assert run(3).world.digest != run(4).world.digest


def test_a_broken_law_tells_the_seed_and_the_end_of_the_trace() -> None:
    scenario = Scenario(5)
    scenario.world.laws.append(lambda: _never_more_than_events(scenario, 100))
    with pytest.raises(
        SimulationError, match=r"^seed 5, at .* ms: AssertionError: too many events"
    ) as failure:
        scenario.run()
    assert scenario.world.trace[-1] in str(failure.value)


def _never_more_than_events(scenario: Scenario, limit: int) -> None:
    assert scenario.world.num_events <= limit, "too many events"


# --- the simulation finds what it is there to find ---------------------------------------------------


def breaks_some_world() -> bool:
    for seed in range(60):
        try:
            run(seed)
        except SimulationError:
            return True
    return False


def test_a_plan_that_is_not_sent_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_: executor_session.ExecutorSession) -> list[BatchPlan]:
        return []

    monkeypatch.setattr(executor_session.ExecutorSession, "resend", nothing)
    assert breaks_some_world()


def test_a_block_that_is_not_given_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    release = blocks.BlockManager.release

    def forget_one(self: blocks.BlockManager, block_ids: list[int]) -> None:
        release(self, block_ids[1:])

    monkeypatch.setattr(blocks.BlockManager, "release", forget_one)
    assert breaks_some_world()


def test_a_cursor_that_starts_a_token_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attach = router_session.RouterSession.attach

    def attach_early(
        self: router_session.RouterSession, handle: int, seq: Sequence, num_received: int
    ) -> router_session.RouterSession | None:
        return attach(self, handle, seq, max(0, num_received - 1))

    monkeypatch.setattr(router_session.RouterSession, "attach", attach_early)
    assert breaks_some_world()


def test_a_recompute_of_the_prompt_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def output_forgotten(self: Sequence) -> None:
        self.token_ids = array("I", self.token_ids[: self.num_prompt_tokens])
        self.num_computed_tokens = 0
        self.num_known_tokens = min(len(self.token_ids), self.max_len - 1)

    monkeypatch.setattr(Sequence, "forget_computed", output_forgotten)
    assert breaks_some_world()

"""Hundreds of worlds, each with its own shape, requests, delays, cuts and crashes; no law may break in any.

A seed that fails prints the end of its trace; `python -m tests.simulation SEED` shows all of it.
"""

import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.simulation.scenario import Scenario
from tests.simulation.world import SimulationError

SEEDS, SEEDS_A_TEST = 2_000, 100


def run(seed: int) -> Scenario:
    scenario = Scenario(seed)
    scenario.run()
    return scenario


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_A_TEST))
def test_no_law_breaks_whatever_is_cut_or_crashes(first: int) -> None:
    for seed in range(first, first + SEEDS_A_TEST):
        run(seed)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(SEEDS, SEEDS + 20_000, 1_000))
def test_no_law_breaks_in_many_more_worlds(first: int) -> None:
    for seed in range(first, first + 1_000):
        run(seed)


def test_the_worlds_meet_what_they_are_made_for() -> None:
    met: Counter[str] = Counter()
    signs = {
        "kept result": "is answered again",
        "lost executor": "has lost executor",
        "resubmission": "comes with",
        "resubmission without ids": "comes with 0 ids",
        "crash of a scheduler": "scheduler0   crashes",
        "crash of a router": "router0      crashes",
        "client that goes on at another router": "has lost its router",
        "cut": "is cut",
        "slow link": "is slow",
        "frozen process": "freezes for",
        "clock jump": "clock jumps",
        "slow executor": "times slower",
        "executor that hangs": " is late",
        "executor killed by a request": "dies of step",
        "answer that does not fit": " wrongly: ",
        "executor that is fenced": "fences executor",
        "stream that has a newer one": "ended: ABORTED",
        "take-over": "leads at term 2",
        "leader that steps down": "steps down",
        "request that moves": " leaves scheduler",
        **{reason: f"ends: {reason}" for reason in ("STOP", "LENGTH", "DEADLINE")},
        "given up": "gives up: ABORT",
    }
    for seed in range(60):
        scenario = run(seed)
        trace = "\n".join(scenario.world.trace)
        met["preemption"] += sum(node.core.counters.preemptions for node in scenario.schedulers)
        met["refusal"] += sum(client.num_refused for client in scenario.clients)
        for name, sign in signs.items():
            met[name] += trace.count(sign)
    assert all(met[name] for name in (*signs, "preemption", "refusal")), met
    assert met["resubmission"] > met["resubmission without ids"]


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

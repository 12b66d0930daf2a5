"""Each scheme differs from the others in what it is named for."""

from dataclasses import replace

import pytest

from chairlift.lab.loads import Load, fresh_prompt
from chairlift.lab.loop import Arrival, Step
from chairlift.lab.run import Setup, longest, served, simulate
from chairlift.lab.schemes import SCHEMES
from chairlift.lab.step_times import Linear
from scheduler.policy import Admission, Limits
from scheduler.waiting import Policy

STEP = Linear(base_us=10_000, per_token_us=100)
SETUP = Setup(
    STEP,
    num_blocks=64,
    block_size=4,
    max_num_seqs=8,
    max_num_batched_tokens=32,
    max_seq_len=128,
    limits=Limits(window=1, prefix_caching=False),
)
LOAD = Load(60, prompt="uniform:5,60", output="uniform:1,40", arrivals="poisson", rate=20.0)


@pytest.mark.parametrize("name", list(SCHEMES))
@pytest.mark.parametrize("policy", list(Policy))
def test_every_scheme_serves_every_request_its_tokens(name: str, policy: Policy) -> None:
    setup = replace(SETUP, limits=replace(SETUP.limits, policy=policy))
    loop = served(setup, LOAD, name)
    wanted = [item.num_output_tokens for item in LOAD]
    assert list(loop.records.num_output_tokens) == wanted
    assert loop.core.is_idle


def test_orca_reserves_less_the_more_it_knows() -> None:
    running = [simulate(SETUP, LOAD, f"orca-{name}").mean_running for name in ("max", "pow2", "oracle")]
    assert running == sorted(running)
    assert running[0] <= 2  # 256 slots hold two of the longest
    assert running[2] > 1.5 * running[0]


@pytest.mark.parametrize("name", ["orca-max", "orca-pow2", "orca-oracle"])
def test_who_has_reserved_is_never_preempted_and_prompts_are_whole(name: str) -> None:
    steps: list[Step] = []
    loop = served(SETUP, LOAD, name, on_step=steps.append)
    assert loop.core.counters.preemptions == 0
    chunks = [chunk for step in steps for chunk in step.plan.filled]
    assert len(chunks) == LOAD.num_requests


@pytest.mark.parametrize("block_size", [16, 12])
def test_the_longest_run_of_a_buddy_allocator_is_what_is_reserved(block_size: int) -> None:
    setup = replace(SETUP, num_blocks=785, block_size=block_size, max_seq_len=1 << 20)
    load = Load(4, prompt="100", output="100", arrivals="at-once")
    for name in ("orca-max-buddy", "contiguous-buddy"):
        assert simulate(setup, load, name).refused == 0
    assert longest(setup, "orca-max-buddy") == 8192 // block_size * block_size
    assert longest(setup, "orca-max") == 785 * block_size
    too_long = Load(1, prompt="100", output="8092", arrivals="at-once")
    assert simulate(setup, too_long, "contiguous-buddy").refused == (block_size == 12)


def test_what_the_reservations_are() -> None:
    arrival = Arrival(0.0, fresh_prompt(1, 100), 25, 25)
    reserved = [
        next(SCHEMES[f"orca-{name}"].arrivals([arrival], 2048)).max_tokens
        for name in ("max", "pow2", "oracle")
    ]
    assert reserved == [1948, 32, 25]


@pytest.mark.parametrize("name", list(SCHEMES))
def test_what_clients_allow_is_the_same_under_every_scheme(name: str) -> None:
    load = replace(LOAD, output="uniform:1,80", max_tokens=20)
    assert list(served(SETUP, load, name).records.num_output_tokens) == [
        min(20, item.num_output_tokens) for item in load
    ]


def test_prefill_first_never_decodes_beside_a_prompt() -> None:
    steps: list[Step] = []
    served(SETUP, LOAD, "prefill-first", on_step=steps.append)
    kinds = set()
    for step in steps:
        prompts = len(step.plan.filled)
        assert prompts in {0, len(step.plan.rows)}
        kinds.add(bool(prompts))
    assert kinds == {True, False}


def test_decode_first_stalls_nobody_who_runs() -> None:
    """Between two tokens of one that runs there is one step, and a step is never longer than its budget."""
    load = Load(40, prompt="uniform:40,60", output="20", arrivals="poisson", rate=6.0)
    setup = replace(SETUP, num_blocks=1000)
    longest = (STEP.base_us + STEP.per_token_us * SETUP.max_num_batched_tokens) / 1e6
    assert simulate(setup, load, "decode-first").between_tokens_p99 <= longest * 1.003
    assert simulate(setup, load, "prefill-first").between_tokens_p99 > longest * 1.003


def test_iteration_level_batching_is_ahead_and_padding_behind_where_lengths_differ() -> None:
    load = Load(60, prompt="10", output="exponential:20", arrivals="at-once", max_tokens=100)
    setup = replace(SETUP, num_blocks=1000)
    seconds = [simulate(setup, load, name).seconds for name in ("chairlift", "request", "request-padded")]
    assert seconds == sorted(seconds)
    assert seconds[1] > 1.5 * seconds[0]


def test_where_all_are_alike_the_gain_vanishes() -> None:
    load = Load(64, prompt="4", output="20", arrivals="at-once")
    setup = replace(SETUP, num_blocks=1000)
    ours, theirs = (simulate(setup, load, name).seconds for name in ("chairlift", "request"))
    assert ours == pytest.approx(theirs, rel=0.02)


def test_a_scheme_that_leaves_admission_free_takes_the_operators() -> None:
    limits = Limits(window=1, admission=Admission.RESERVE)
    assert SCHEMES["chairlift"].make(limits).limits.admission is Admission.RESERVE
    assert SCHEMES["decode-first"].make(limits).limits.admission is Admission.OPTIMISTIC

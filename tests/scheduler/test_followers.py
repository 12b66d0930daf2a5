"""Who goes on when the one whose beginning they wait for does not: one of each line, in the queue's order."""

import random
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import pytest

from scheduler import entrance
from scheduler.executor_state import ExecutorState
from scheduler.policy import Admission, Limits
from scheduler.sequence import FinishReason, Sequence, State
from scheduler.tenants import TenantLimits
from scheduler.waiting import Policy
from tests.scheduler.fleet import Fleet
from tests.scheduler.harness import Harness

DOCUMENT = [i % 89 for i in range(200)]


def behind_a_leader(
    names: Iterable[str], deadlines: Mapping[str, float] = MappingProxyType({}), **fields: object
) -> Harness:
    """`leader` is computing the document that all want, and follow it; a name begins with its tenant."""
    limits = Limits(**({"window": 1, "watermark": 0.0} | fields))  # type: ignore[arg-type]
    h = Harness(
        limits, num_blocks=512, block_size=16, max_num_seqs=8, max_num_batched_tokens=256, max_seq_len=1024
    )
    h.submit("leader", DOCUMENT, 4, priority=-1, ignore_eos=True)
    for i, name in enumerate(names):
        ids = [*DOCUMENT, i % 89]
        h.submit(name, ids, 4, tenant=name[0], deadline=deadlines.get(name), ignore_eos=True)
    h.plan()
    assert h.members() == {"leader"}
    assert len(h.core.waiting.parked) == len(h.core.waiting)
    return h


def give_up(h: Harness, name: str) -> None:
    h.core.cancel(h.sequences.pop(name).request.key, FinishReason.ABORT, h.now)


@pytest.mark.parametrize("count", [4, 400])
def test_of_however_many_one_of_each_tenant_looks_again(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    h = behind_a_leader([f"{'ab'[i % 2]}{i}" for i in range(count)])
    looked_at: list[Sequence] = []
    find_place = h.core.find_place

    def watched(state: ExecutorState, seq: Sequence, *, follows: bool) -> entrance.Found:
        looked_at.append(seq)
        return find_place(state, seq, follows=follows)

    monkeypatch.setattr(h.core, "find_place", watched)
    for leader, next_ones in (("leader", ["a0", "b1"]), ("a0", ["b1", "a2"]), ("b1", ["a2", "b3"])):
        give_up(h, leader)
        h.result()
        looked_at.clear()
        h.plan()
        assert [seq.request.request_id for seq in looked_at] == next_ones
        assert h.members() == {next_ones[0]}
    h.run_to_end()
    h.check_outputs()


def test_a_tenant_at_its_limit_keeps_no_other_one_waiting() -> None:
    h = behind_a_leader(["t0", "t1", "u0", "u1"], window=2, tenants={"t": TenantLimits(max_running=1)})
    h.submit("t other", [7], 60, tenant="t", ignore_eos=True)  # takes the seat of t
    h.plan()
    assert "t other" in h.members()
    give_up(h, "leader")
    while h.sequences["u0"].state is State.WAITING or h.sequences["u1"].state is State.WAITING:
        h.step()
    assert h.sequences["t0"].state is State.WAITING
    h.run_to_end()
    h.check_outputs()


def test_when_the_one_that_the_others_follow_is_given_up_before_its_turn_the_next_one_goes_on() -> None:
    h = behind_a_leader(["a0", "a1", "a2", "a3"])
    for name in ("leader", "a0", "a1"):
        give_up(h, name)
    h.result()
    h.plan()
    assert h.members() == {"a2"}
    h.run_to_end()
    h.check_outputs()


def test_one_that_is_put_behind_for_being_late_takes_nobody_with_it() -> None:
    h = behind_a_leader(["a0", "a1"], {"a0": 50.0, "a1": 100.0}, policy=Policy.DEADLINE)
    give_up(h, "leader")
    h.result()
    h.now = 60.0
    h.plan()
    assert h.members() == {"a1"}
    h.run_to_end()
    h.check_outputs()


@pytest.mark.parametrize("seed", range(6))
def test_nobody_is_forgotten_whoever_goes_and_whatever_blocks_executors_have(seed: int) -> None:
    rng = random.Random(seed)
    fleet = Fleet(Limits(watermark=0.0, admission=Admission.FORECAST, aging_seconds=0.01), seed)
    shapes = {"a": {"block_size": 4, "num_blocks": 200}, "b": {"block_size": 16, "num_blocks": 50}}
    for name, shape in shapes.items():
        fleet.attach(name, max_num_batched_tokens=32, max_seq_len=256, **shape)
    gone: set[str] = set()
    for i in range(80):
        prompt = [*DOCUMENT[: rng.choice([30, 70, 150])], i % 89]
        fleet.submit(f"r{i}", prompt, rng.randrange(1, 9), tenant=rng.choice("tu"), priority=rng.randrange(2))
        for _ in range(rng.randrange(3)):
            fleet.turn()
        if rng.random() < 0.3:
            seq = rng.choice(fleet.sequences)
            if seq.state is not State.FINISHED:
                fleet.core.cancel(seq.request.key, FinishReason.ABORT, fleet.now)
                gone.add(seq.request.request_id)
        if rng.random() < 0.05:
            name = rng.choice("ab")
            fleet.lose(name)
            fleet.attach(name, max_num_batched_tokens=32, max_seq_len=256, **shapes[name])
    fleet.run()
    fleet.check_outputs(but=gone)


def test_ending_a_line_one_by_one_looks_at_each_of_it_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not each time at all that are left: thousands may wait for one prompt."""
    h = behind_a_leader(f"a{i}" for i in range(400))
    looks = 0
    is_parked_freely = h.core.waiting.is_parked_freely

    def counted(seq: Sequence) -> bool:
        nonlocal looks
        looks += 1
        return is_parked_freely(seq)

    monkeypatch.setattr(h.core.waiting, "is_parked_freely", counted)
    for name in list(h.sequences):
        give_up(h, name)
    assert not h.core.waiting
    assert 400 <= looks <= 2000

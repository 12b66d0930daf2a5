"""Who enters now, who holds the others back, who is passed over, and who makes way."""

import random

import pytest

from scheduler import admitting, entrance
from scheduler.batching import Batching
from scheduler.explain import Reason
from scheduler.policy import Admission, Limits
from scheduler.sequence import FinishReason, Sequence, State
from scheduler.tenants import TenantLimits
from scheduler.waiting import Policy
from tests.scheduler.harness import EXECUTOR, Harness

ADMISSIONS = pytest.mark.parametrize("admission", list(Admission))


def limits(**fields: object) -> Limits:
    return Limits(**({"watermark": 0.0, "window": 1} | fields))  # type: ignore[arg-type]


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + salt) % 90 for i in range(length)]


# --- what stands in everybody's way ---------------------------------------------------------------------


def test_nobody_a_seat_and_tokens_are_asked_for_in_this_order() -> None:
    h = Harness(limits(), max_num_seqs=1)
    state = h.core.executors[EXECUTOR]
    seq = h.submit("A", [1], 9, ignore_eos=True)
    assert entrance.obstacle(state, None, has_budget=False) is None
    assert entrance.obstacle(state, seq, has_budget=True) is None
    assert entrance.obstacle(state, seq, has_budget=False) is Reason.QUEUED_FOR_TOKENS
    h.step()
    other = h.submit("B", [2], 9)
    assert entrance.obstacle(state, other, has_budget=False) is Reason.QUEUED_FOR_SEAT


# --- how much room --------------------------------------------------------------------------------------


def beside_a_long_one(admission: Admission, **fields: object) -> Harness:
    """10 blocks of 4 tokens; one runs that has 13 tokens of 32, and takes its 4th block in the next step."""
    h = Harness(limits(admission=admission, **fields), num_blocks=10, block_size=4)
    h.submit("long", prompt(12), 20, ignore_eos=True)
    h.step()
    return h


@pytest.mark.parametrize(
    ("admission", "length", "max_tokens", "enters"),
    [
        (Admission.RESERVE, 4, 5, True),  # 8 and 2 of 10 blocks
        (Admission.RESERVE, 4, 6, False),  # 8 and 3
        (Admission.FORECAST, 4, 8, True),  # 21 and 12 tokens when the short one ends, half a block lost each
        (Admission.FORECAST, 4, 10, False),  # 23 and 14
        (Admission.OPTIMISTIC, 24, 4, True),  # 4 and 6 blocks now
        (Admission.OPTIMISTIC, 25, 3, False),
    ],
)
def test_each_admission_asks_for_its_own_room(
    admission: Admission, length: int, max_tokens: int, enters: bool
) -> None:
    h = beside_a_long_one(admission)
    seq = h.submit("new", prompt(length, 3), max_tokens, ignore_eos=True)
    h.step()
    assert (seq.state is State.RUNNING) is enters
    h.run_to_end()
    h.check_outputs()


@pytest.mark.parametrize(
    ("admission", "length", "max_tokens"), [(Admission.FORECAST, 4, 8), (Admission.OPTIMISTIC, 24, 4)]
)
def test_the_watermark_is_left_free(admission: Admission, length: int, max_tokens: int) -> None:
    for watermark, enters in ((0.0, True), (0.15, False)):
        h = beside_a_long_one(admission, watermark=watermark)
        seq = h.submit("new", prompt(length, 3), max_tokens, ignore_eos=True)
        h.step()
        assert (seq.state is State.RUNNING) is enters


@ADMISSIONS
def test_alone_whatever_fits_at_all_may_enter(admission: Admission) -> None:
    h = Harness(limits(admission=admission, watermark=0.5), num_blocks=10, block_size=4)
    h.submit("A", prompt(35), 5, ignore_eos=True)
    h.run_to_end()
    h.check_outputs()


@ADMISSIONS
def test_a_head_that_found_no_room_finds_it_when_somebody_leaves(admission: Admission) -> None:
    h = Harness(limits(admission=admission), num_blocks=10, block_size=4)
    first = h.submit("A", prompt(20), 10, ignore_eos=True)
    h.step()
    second = h.submit("B", prompt(24, 3), 10, ignore_eos=True)
    for _ in range(5):
        h.step()
        assert second.state is State.WAITING
    h.core.cancel(first.request.key, FinishReason.ABORT, h.now)
    del h.sequences["A"]
    h.step()
    assert second.state is State.RUNNING
    h.run_to_end()
    h.check_outputs()


def test_who_finds_its_beginning_held_by_others_needs_less() -> None:
    h = Harness(limits(admission=Admission.OPTIMISTIC), num_blocks=9, block_size=4)
    h.submit("A", prompt(24), 3, ignore_eos=True)
    h.step()
    twin = h.submit("twin", [*prompt(24), 1, 2], 3, ignore_eos=True)
    h.step()
    assert twin.state is State.RUNNING
    assert twin.num_cached_tokens == 24
    h.run_to_end()
    h.check_outputs()


@ADMISSIONS
def test_a_beginning_that_all_share_is_counted_once(admission: Admission) -> None:
    h = Harness(
        limits(admission=admission),
        num_blocks=128,
        block_size=16,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        max_seq_len=1024,
    )
    for i in range(32):
        h.submit(f"r{i}", [*prompt(512), i, i + 1], 16, ignore_eos=True)
    most = 0
    while not h.core.is_idle:
        h.step()
        most = max(most, h.core.num_running)
    h.check_outputs()
    assert most == 32
    assert h.core.counters.preemptions == 0


# --- tenants --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tenant_limits", [TenantLimits(max_running=1), TenantLimits(max_blocks=3)])
@ADMISSIONS
def test_a_tenant_at_its_own_limit_is_passed_over_and_holds_nobody_back(
    tenant_limits: TenantLimits, admission: Admission
) -> None:
    h = Harness(limits(admission=admission, tenants={"t": tenant_limits}))
    h.submit("one", prompt(6), 6, tenant="t", ignore_eos=True)
    two = h.submit("two", prompt(6, 1), 6, tenant="t", ignore_eos=True)
    other = h.submit("other", prompt(6, 2), 3, ignore_eos=True)
    h.step()
    assert (two.state, other.state) == (State.WAITING, State.RUNNING)
    tenant = h.core.tenants.get("t", 0.0)
    while not h.core.is_idle:
        h.step()
        assert tenant.num_running <= 1
    h.check_outputs()


def test_a_tenants_own_limit_does_not_forbid_one_that_is_larger_than_it() -> None:
    h = Harness(limits(tenants={"t": TenantLimits(max_blocks=2)}))
    for i in range(3):
        h.submit(f"r{i}", prompt(40, i), 4, tenant="t", ignore_eos=True)
    while not h.core.is_idle:
        h.step()
        assert h.core.tenants.get("t", 0.0).num_running <= 1
    h.check_outputs()


def beside_one_of_its_tenant() -> Harness:
    """Of ten blocks of the tenant's, one holds six and `big`, which wants eight, was passed over."""
    own = TenantLimits(max_blocks=10)
    h = Harness(
        limits(admission=Admission.FORECAST, tenants={"t": own}), num_blocks=64, block_size=4, max_num_seqs=8
    )
    h.submit("runs", prompt(16), 8, tenant="t", ignore_eos=True)
    h.step()
    h.submit("big", prompt(32, 3), 4, tenant="t", priority=5, ignore_eos=True)
    h.step()
    assert h.sequences["big"].state is State.WAITING
    return h


@pytest.mark.parametrize("priority", [0, 5])
def test_whom_its_tenants_limit_stops_stops_those_behind_it_alone(priority: int) -> None:
    h = beside_one_of_its_tenant()
    small = h.submit("small", prompt(2, 5), 2, tenant="t", priority=priority, ignore_eos=True)
    h.step()
    assert (small.state is State.RUNNING) is (priority < 5)
    h.run_to_end()
    h.check_outputs()


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.DEADLINE])
def test_when_the_one_that_its_tenants_limit_stopped_is_given_up_those_behind_it_may_enter(
    reason: FinishReason,
) -> None:
    h = beside_one_of_its_tenant()
    small = h.submit("small", prompt(2, 5), 2, tenant="t", priority=5, ignore_eos=True)
    h.step()
    assert small.state is State.WAITING
    h.core.cancel(h.sequences.pop("big").request.key, reason, h.now)
    h.step()
    assert small.state is State.RUNNING
    h.run_to_end()
    h.check_outputs()


# --- who makes way --------------------------------------------------------------------------------------


def low_ones(h: Harness, count: int, length: int = 8, max_tokens: int = 60) -> list[Sequence]:
    """Running sequences of low importance that have got somewhere."""
    seqs = [
        h.submit(f"low{i}", prompt(length, i), max_tokens, priority=5, ignore_eos=True) for i in range(count)
    ]
    for _ in range(12):
        h.step()
    return seqs


@ADMISSIONS
def test_b07_the_more_important_enters_with_the_plan_for_which_somebody_made_way(
    admission: Admission,
) -> None:
    h = Harness(limits(admission=admission), max_num_seqs=2)
    low_ones(h, 2)
    high = h.submit("high", prompt(4, 50), 5, ignore_eos=True)
    h.step()
    assert high.state is State.RUNNING
    assert h.core.counters.displacements == 1
    h.run_to_end()
    h.check_outputs()


@ADMISSIONS
@pytest.mark.parametrize(("policy", "budget"), [(Policy.FCFS, 512), (Policy.FCFS, 9), (Policy.DEADLINE, 9)])
@pytest.mark.parametrize("seed", range(12))
def test_nobody_makes_way_without_the_head_entering_for_it(
    admission: Admission, policy: Policy, budget: int, seed: int
) -> None:
    rng = random.Random(seed)
    h = Harness(
        limits(admission=admission, policy=policy, tenants={"t": TenantLimits(max_blocks=8)}),
        num_blocks=rng.randrange(16, 40),
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=budget,
    )
    num_displacements = 0
    for i in range(60):
        length = rng.randrange(1, 40)
        h.submit(
            f"r{i}",
            prompt(length, rng.choice([0, 0, i])),
            rng.randrange(1, 24),
            priority=rng.randrange(4),
            tenant=rng.choice(["", "t"]),
            ignore_eos=True,
            deadline=h.now + rng.choice([1.0, 5.0, 1000.0]),
        )
        for _ in range(rng.randrange(6)):
            before = h.core.counters.displacements
            h.executor.step_us = 100_000
            h.step()
            h.now += 0.1
            if h.core.counters.displacements > before:
                num_displacements += 1
                plan = h.plans[-1]
                entered = {new.seq_id for new in plan.admitted}
                assert entered
                displaced = {leaver.seq for leaver in plan.left if leaver.reason is None}
                best = min(
                    seq.request.priority
                    for seq, seq_id in zip(plan.rows, plan.seq_ids, strict=True)
                    if seq_id in entered
                )
                assert all(seq.request.priority > best for seq in displaced)
    h.run_to_end()
    h.check_outputs()


def test_nobody_makes_way_before_the_step_in_which_the_head_has_tokens() -> None:
    """A prompt that comes before it takes the whole budget: until then its victim goes on."""
    h = Harness(
        limits(aging_seconds=None),
        num_blocks=512,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_seq_len=1024,
    )
    low_ones(h, 3, max_tokens=100)
    h.submit("long", prompt(300, 90), 4, ignore_eos=True)
    h.step()
    head = h.submit("head", prompt(3, 80), 4, ignore_eos=True)
    while head.state is State.WAITING:
        assert h.core.counters.displacements == 0
        h.step()
        assert len(h.core.executors[EXECUTOR].running) == 4, "no seat is empty"
    assert h.core.counters.displacements == 1
    h.run_to_end()
    h.check_outputs()


@pytest.mark.parametrize("is_shared", [False, True])
def test_many_that_become_too_late_at_once_are_put_behind_over_several_plans(
    is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that would be in time if all that may be cached of them were: the entrance finds it out."""
    monkeypatch.setattr(admitting, "MAX_PUT_BEHIND", 4)
    h = Harness(
        limits(policy=Policy.DEADLINE), max_num_seqs=1, block_size=4, num_blocks=512, max_seq_len=1024
    )  # fmt: skip
    for i in range(10):
        h.submit(f"warm{i}", prompt(3 + i, 20 + i), 3, ignore_eos=True)
    h.submit("before", prompt(8), 3, ignore_eos=True)
    h.run_to_end()
    running = h.submit("running", [1], 60, ignore_eos=True)
    h.step()
    late = [
        h.submit(
            f"late{i}", prompt(4 * is_shared) + prompt(300, 30 + i), 3, ignore_eos=True, deadline=h.now + 50
        )
        for i in range(10)
    ]
    on_time = h.submit("on time", [2], 3, ignore_eos=True, deadline=h.now + 500)
    best, likely = h.core.slack.latest_start_at_best(late[0]), h.core.slack.latest_start(late[0])
    assert (best > likely) == is_shared
    h.now = (best + likely) / 2 if is_shared else best + 1e-5
    h.core.cancel(running.request.key, FinishReason.ABORT, h.now)
    state = h.core.executors[EXECUTOR]
    h.plan()  # tells the executor of the one that has gone
    h.result()
    for _ in range(2):
        assert state.is_still_looking
        assert not state.running
        h.plan()
    assert not state.is_still_looking
    assert list(state.running.values()) == [on_time]


def test_a_prompt_that_is_still_hashed_is_not_forgotten_for_one_that_is_put_behind() -> None:
    """Else its executor, if it is idle, would not be asked for a plan again."""
    h = Harness(limits(policy=Policy.DEADLINE))
    state = h.core.executors[EXECUTOR]
    for is_hashing in (False, True):
        state.is_still_looking = is_hashing
        assert admitting._may_look_on(state)
        assert state.is_still_looking == is_hashing
    state.is_still_looking, state.num_put_behind = False, admitting.MAX_PUT_BEHIND
    assert not admitting._may_look_on(state)
    assert state.is_still_looking


def test_nobody_makes_way_for_one_that_is_put_behind_as_too_late() -> None:
    everybody = limits(policy=Policy.DEADLINE, admission=Admission.OPTIMISTIC)
    h = Harness(everybody, num_blocks=32, block_size=4, max_num_seqs=2)
    low = h.submit("low", prompt(2), 60, priority=5, ignore_eos=True)
    h.submit("high", prompt(40, 50), 60, ignore_eos=True)
    for _ in range(15):
        h.step()
    h.submit("late", prompt(1, 51), 30, ignore_eos=True, deadline=h.now + 50)
    h.submit("too big as yet", prompt(100, 52), 20, ignore_eos=True, deadline=h.now + 100)
    h.now += 49.9999  # it has waited until it was too late
    h.step()
    assert low.state is State.RUNNING
    assert h.core.counters.displacements == 0


@ADMISSIONS
def test_b07_the_important_do_not_wait_for_room_that_the_less_important_hold(admission: Admission) -> None:
    h = Harness(limits(admission=admission), num_blocks=40, block_size=4, max_num_seqs=8)
    low_ones(h, 5, length=8, max_tokens=24)
    high = h.submit("high", prompt(16, 50), 20, ignore_eos=True)
    h.step()
    h.step()
    assert high.state is State.RUNNING
    h.run_to_end()
    h.check_outputs()


@ADMISSIONS
def test_b07_a_small_token_budget_is_no_refuge_from_the_more_important(admission: Admission) -> None:
    h = Harness(
        limits(admission=admission), num_blocks=512, block_size=4, max_num_seqs=8, max_num_batched_tokens=4
    )
    low_ones(h, 4, length=2, max_tokens=200)
    high = h.submit("high", prompt(1, 50), 4, ignore_eos=True)
    h.step()
    h.step()
    assert high.num_output_tokens
    h.run_to_end()
    h.check_outputs()


def test_nobody_makes_way_whose_blocks_the_head_would_only_share() -> None:
    """Of the four blocks of `low`, three are the head's own beginning: its leaving would free one."""
    h = Harness(limits(admission=Admission.OPTIMISTIC), num_blocks=9, block_size=16)
    low = h.submit("low", prompt(48), 14, priority=5, ignore_eos=True)
    h.submit("high", prompt(50, 60), 14, ignore_eos=True)
    for _ in range(11):
        h.step()
    head = h.submit("head", prompt(95), 1, ignore_eos=True)
    h.step()
    assert (low.state, head.state) == (State.RUNNING, State.WAITING)
    assert h.core.counters.displacements == 0
    h.run_to_end()
    h.check_outputs()


def test_nobody_makes_way_for_one_whose_tenant_is_at_its_own_limit() -> None:
    for tenant_limits in (TenantLimits(max_running=1), TenantLimits(max_blocks=4)):
        h = Harness(limits(tenants={"t": tenant_limits}), max_num_seqs=3)
        h.submit("first", prompt(8, 70), 40, tenant="t", priority=1, ignore_eos=True)
        low_ones(h, 2)
        h.submit("second", prompt(8, 71), 4, tenant="t", priority=0, ignore_eos=True)
        for _ in range(10):
            h.step()
            assert h.core.counters.displacements == 0
        h.run_to_end()
        h.check_outputs()


@pytest.mark.parametrize("batching", [Batching.REQUEST, Batching.REQUEST_PADDED])
def test_nobody_makes_way_in_a_batch_that_is_closed(batching: Batching) -> None:
    h = Harness(limits(), batching, max_num_seqs=2)
    low_ones(h, 2)
    h.submit("high", prompt(4, 50), 5, ignore_eos=True)
    h.run_to_end()
    assert h.core.counters.displacements == 0
    h.check_outputs()


@ADMISSIONS
def test_b07_a_long_prompt_of_low_importance_leaves_the_important_their_tokens(admission: Admission) -> None:
    h = Harness(limits(admission=admission), num_blocks=512, max_num_batched_tokens=16, max_seq_len=1024)
    h.submit("long", prompt(800), 4, priority=5, ignore_eos=True)
    h.step()
    h.submit("high", prompt(20, 50), 4, priority=0, ignore_eos=True)
    h.submit("low", prompt(20, 51), 4, priority=5, ignore_eos=True)
    h.step()
    assert h.members() == {"high"}
    h.step()
    assert h.members() == {"high", "long"}
    while h.sequences["high"].state is not State.FINISHED:
        h.step()
        assert "low" not in h.members()
    h.run_to_end()
    h.check_outputs()


@pytest.mark.parametrize("waited", [5.0, 25.0, 500.0])
def test_who_made_way_does_not_come_back_before_those_it_made_way_for(waited: float) -> None:
    """Its age was not spent waiting, so it is worth no importance."""
    h = Harness(limits(aging_seconds=10.0), max_num_seqs=1)
    low = h.submit("low", prompt(4), 60, priority=5, ignore_eos=True)
    for _ in range(12):
        h.step()
    h.now += waited
    high = h.submit("high", prompt(4, 1), 12, ignore_eos=True)
    h.step()
    assert (low.state, high.state) == (State.WAITING, State.RUNNING)
    h.run_to_end()
    h.check_outputs()
    assert low.num_displacements == 1


# --- deadlines ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_late", [False, True])
def test_under_the_deadline_policy_a_call_that_is_made_again_has_its_new_place(is_late: bool) -> None:
    h = Harness(limits(policy=Policy.DEADLINE), max_num_seqs=1)
    running = h.submit("running", prompt(4), 40, ignore_eos=True)
    for _ in range(5):
        h.step()
    first = h.submit("first", prompt(4, 1), 4, ignore_eos=True, deadline=h.now + 1.0)
    others = [
        h.submit(f"r{i}", prompt(4, 2 + i), 4, ignore_eos=True, deadline=h.now + 50.0) for i in range(2)
    ]
    if is_late:
        h.now += 0.9999  # too late to be done in the second it had: it is put behind all others
        h.core.cancel(running.request.key, FinishReason.ABORT, h.now)
        h.step()
        assert others[0].state is State.RUNNING
    again = h.core.submit(
        h.request("first", prompt(4, 1), 4, ignore_eos=True, deadline=h.now + 20.0), now=h.now
    )
    assert again is first
    started = []
    while first.state is not State.FINISHED:
        h.step()
        started += [seq for seq in [first, *others] if seq.has_started and seq not in started]
    assert started.index(first) == (1 if is_late else 0)
    h.core.submit(h.request("r1", prompt(4, 3), 4, ignore_eos=True), now=h.now)
    assert others[1].latest_start == float("inf"), "it has no deadline any more"


@pytest.mark.parametrize(("num_shared", "first"), [(800, "chat"), (100, "other")])
def test_at_the_entrance_what_is_cached_decides_who_is_too_late(num_shared: int, first: str) -> None:
    """Computed anew it would be too late by far; how much of it is cached is known when its turn has come."""
    h = Harness(
        limits(policy=Policy.DEADLINE), num_blocks=512, max_num_seqs=1, max_num_batched_tokens=1024,
        max_seq_len=1024,
    )  # fmt: skip
    for i in range(10):
        h.submit(f"warm{i}", prompt(3 + i, i), 3, ignore_eos=True)
    h.submit("before", prompt(800), 3, ignore_eos=True)
    h.run_to_end()
    h.submit("runs", [1], 3, ignore_eos=True)
    h.step()
    question = [*prompt(num_shared), *([89] * (801 - num_shared))]
    h.submit("other", [7], 3, ignore_eos=True, deadline=h.now + 100.0)
    chat = h.submit("chat", question, 3, ignore_eos=True, deadline=h.now + 0.006)
    assert chat.latest_start < h.now
    order: list[str] = []
    while not h.core.is_idle:
        h.step()
        order += [name for name in h.members() if name not in order]
    assert order[1] == first
    h.check_outputs()


def test_under_the_deadline_policy_least_slack_goes_first() -> None:
    h = Harness(limits(policy=Policy.DEADLINE), max_num_seqs=1)
    h.submit("runs", [1], 3, ignore_eos=True)
    h.step()
    h.submit("whenever", [2], 3, ignore_eos=True)
    h.submit("late", [3], 3, deadline=100.0, ignore_eos=True)
    h.submit("soon", [4], 3, deadline=10.0, ignore_eos=True)
    order: list[str] = []
    while not h.core.is_idle:
        h.step()
        order += [name for name in h.members() if name not in order]
    assert order == ["runs", "soon", "late", "whenever"]


# --- a tenant's own blocks, while it grows -------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("admission", list(Admission))
def test_a_tenants_block_limit_holds_while_its_sequences_grow_and_all_of_them_end(
    admission: Admission, window: int
) -> None:
    """One of its own makes room; others are never asked, and the last one left is not held to it."""
    own = TenantLimits(max_blocks=12)
    h = Harness(Limits(window=window, admission=admission, watermark=0.0, tenants={"t": own}), num_blocks=200)
    for i in range(4):
        h.submit(f"r{i}", [i + 1] * 6, 60, tenant="t", ignore_eos=True)
        h.submit(f"other{i}", [50 + i] * 6, 60, tenant="u", ignore_eos=True)
    tenant = h.core.tenants.get("t", 0.0)
    while not h.core.is_idle:
        h.step()
        assert tenant.num_running <= 1 or tenant.num_blocks <= 12
    h.check_outputs()
    preempted = {seq.tenant.name for seq in h.sequences.values() if seq.num_preemptions}
    assert preempted == (set() if admission is Admission.RESERVE else {"t"})

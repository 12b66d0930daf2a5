"""Progress, priorities, preemption, chunks, giving up and lengths, under every policy and admission."""

import itertools
import random
from collections import Counter

import pytest

from scheduler.door import RefusedError
from scheduler.policy import Admission, Limits
from scheduler.sequence import FinishReason, Sequence, State
from scheduler.waiting import Policy
from tests.rig.checking_executor import expected_output
from tests.scheduler.harness import EXECUTOR, Harness

KINDS = list(itertools.product(Policy, Admission, [1, 2]))
NAMES = [f"{policy.value}-{admission.value}-window{window}" for policy, admission, window in KINDS]


@pytest.fixture(params=KINDS, ids=NAMES)
def everywhere(request: pytest.FixtureRequest) -> Limits:
    """Each policy with each admission and window."""
    policy, admission, window = request.param
    return Limits(policy=policy, admission=admission, window=window, watermark=0.0)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + salt) % 90 for i in range(length)]


def check_preemptions(h: Harness) -> None:
    if h.core.limits.admission is Admission.RESERVE:
        assert h.core.counters.preemptions == 0


# --- 1. progress ----------------------------------------------------------------------------------------


def test_b01_what_can_never_fit_hurts_nobody(everywhere: Limits) -> None:
    h = Harness(everywhere, num_blocks=8, block_size=16, max_seq_len=512)
    with pytest.raises(RefusedError, match="at most 128"):
        h.submit("big", prompt(200), 8)
    h.submit("small", prompt(10), 8)
    h.run_to_end()
    h.check_outputs()


def test_b02_a_big_request_starts_although_small_ones_keep_coming(everywhere: Limits) -> None:
    """Order is strict within a tenant: who does not fit yet holds back those behind it."""
    h = Harness(everywhere, num_blocks=20, max_num_seqs=8, block_size=16)
    h.submit("A", prompt(100), 20, ignore_eos=True)
    h.step()
    big = h.submit("B", prompt(230), 10, ignore_eos=True)
    steps_after_a = 0
    for i in range(200):
        if i % 2 == 0:
            h.submit(f"small{i}", prompt(8, i), 4, ignore_eos=True, arrival=h.now + i)
        h.step()
        steps_after_a += h.sequences["A"].state is State.FINISHED
        if big.state is not State.WAITING:
            break
    assert big.state is State.RUNNING
    assert steps_after_a <= 50
    h.run_to_end()
    h.check_outputs()


@pytest.mark.parametrize("seats", [1, 2])
def test_b03_requests_that_end_in_their_first_step_give_their_seat_back(
    everywhere: Limits, seats: int
) -> None:
    h = Harness(everywhere, max_num_seqs=seats)
    for i in range(30):
        for j in range(3):
            h.submit(f"r{i}.{j}", prompt(3, i + j), 1)
        h.run_to_end(max_steps=20)
    h.check_outputs()


def test_b04_with_a_full_cache_no_two_steps_in_a_row_are_empty(everywhere: Limits) -> None:
    h = Harness(everywhere, num_blocks=12, block_size=16)
    for i in range(3):
        h.submit(f"d{i}", prompt(48, i), 40, ignore_eos=True)
    h.step()
    h.submit("waits", prompt(60), 5, ignore_eos=True)
    h.run_to_end()
    h.check_outputs()
    check_preemptions(h)
    empty = [tokens == 0 for tokens in h.executor.tokens_per_step[:-1]]
    assert not any(a and b for a, b in itertools.pairwise(empty))


def test_b05_a_lone_request_needs_no_other_event_to_resume(everywhere: Limits) -> None:
    h = Harness(everywhere)
    seq = h.submit("A", prompt(6), 10, ignore_eos=True)
    h.step()
    h.core.detach(EXECUTOR, h.now)
    h.attach()
    plan = h.plan()
    assert plan is not None
    assert plan.rows == [seq]


# --- 2. priorities --------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("policy", list(Policy))
def test_b06_the_preempted_resumes_before_any_of_its_class_that_never_ran(
    policy: Policy, window: int
) -> None:
    limits = Limits(policy=policy, admission=Admission.OPTIMISTIC, window=window, watermark=0.0)
    h = Harness(limits, num_blocks=8, block_size=16)
    first = h.submit("first", prompt(50, 1), 60, ignore_eos=True)
    a = h.submit("A", prompt(40, 2), 40, ignore_eos=True)
    while not a.num_preemptions:
        h.step()
    b = h.submit("B", prompt(40, 3), 4, ignore_eos=True, arrival=-5.0)
    c = h.submit("C", prompt(40, 4), 4, ignore_eos=True)
    lengths = [len(a.token_ids)]
    while a.state is not State.FINISHED:
        before = a.num_preemptions
        h.step()
        if a.state is State.WAITING:
            assert not b.has_started
            assert not c.has_started
        if a.num_preemptions > before:
            lengths.append(len(a.token_ids))
    assert lengths == sorted(set(lengths)), "never twice without a token in between"
    assert a.num_preemptions <= 2
    assert first.num_preemptions == 0
    h.run_to_end()
    h.check_outputs()


def test_b07_the_more_important_starts_within_two_steps_when_the_others_hold_all_seats(
    everywhere: Limits,
) -> None:
    h = Harness(everywhere, max_num_seqs=2, num_blocks=256, max_seq_len=1024)
    low = [h.submit(f"low{i}", prompt(4, i), 300, priority=1, ignore_eos=True) for i in range(2)]
    for _ in range(20):
        h.step()
    high = h.submit("high", prompt(4, 50), 20, ignore_eos=True)
    h.step()
    h.step()
    assert high.state is State.RUNNING
    assert [seq.state for seq in low].count(State.RUNNING) == 1
    h.run_to_end()
    h.check_outputs()
    assert h.core.counters.displacements == 1
    assert h.core.counters.preemptions == 0


def test_b07_equals_never_throw_each_other_out(everywhere: Limits) -> None:
    h = Harness(everywhere, max_num_seqs=2, num_blocks=256, max_seq_len=1024)
    for i in range(2):
        h.submit(f"runs{i}", prompt(4, i), 220, priority=1, ignore_eos=True)
    for i in range(200):
        h.submit(f"waits{i}", prompt(4, i), 4, priority=1, ignore_eos=True, arrival=h.now - i % 3)
        h.step()
    assert h.core.counters.displacements == h.core.counters.preemptions == 0


def test_b07_no_ping_pong_when_the_important_come_again_and_again(everywhere: Limits) -> None:
    h = Harness(everywhere, max_num_seqs=1, num_blocks=256, max_seq_len=1024)
    low = h.submit("low", prompt(4), 100, priority=1, ignore_eos=True)
    for i in range(60):
        for _ in range(10):
            h.step()
        if i < 30:
            h.submit(f"high{i}", prompt(4, i), 3, ignore_eos=True)
    h.run_to_end()
    h.check_outputs()
    assert 1 <= low.num_displacements <= 3


def test_b08_every_decode_that_is_not_put_off_yields_one_token_a_step(everywhere: Limits) -> None:
    """Counted for 500 steps in which sequences come, are preempted, displaced and cancelled."""
    rng = random.Random(11)
    h = Harness(everywhere, num_blocks=24, block_size=4, max_num_seqs=6)
    for step in range(500):
        if step % 4 == 0:
            h.submit(
                f"r{step}", prompt(rng.randrange(1, 12), step), 20, priority=rng.randrange(3), ignore_eos=True
            )
        plan = h.plan()
        if plan is not None:
            state = h.core.executors[EXECUTOR]
            planned = Counter(plan.seq_ids)
            assert all(count == 1 for count in planned.values())
            for seq_id, seq in state.running.items():
                if seq_id in planned:
                    continue
                is_last_in_flight = seq.num_computed_tokens == seq.num_computable_tokens
                is_put_off = seq.needs_block and not state.blocks.num_free
                assert is_last_in_flight or is_put_off or sum(plan.num_tokens) == 64
        if h.executor.plans and (plan is None or step % 2 or everywhere.window == 1):
            h.result()
    h.run_to_end()
    h.check_outputs()
    check_preemptions(h)


# --- 3. preemption and recompute ------------------------------------------------------------------------


def test_b09_b10_outputs_are_whole_under_pressure(everywhere: Limits) -> None:
    h = Harness(everywhere, num_blocks=14, block_size=16)
    for i, length in enumerate([32, 32, 32, 3]):
        h.submit(f"r{i}", prompt(length, i), 64, ignore_eos=True)
    h.run_to_end()
    h.check_outputs()
    check_preemptions(h)
    if everywhere.admission is Admission.OPTIMISTIC:
        assert h.core.counters.preemptions >= 1


def test_b12_one_that_fills_the_whole_cache_runs_alone_and_is_not_preempted(everywhere: Limits) -> None:
    h = Harness(everywhere, num_blocks=6, block_size=16, max_seq_len=512)
    with pytest.raises(RefusedError, match="180 must be at most 96"):
        h.submit("A", prompt(80), 100)
    alone = h.submit("B", prompt(80), 16, ignore_eos=True)
    h.run_to_end()
    h.submit("small", prompt(4), 4)
    h.run_to_end()
    h.check_outputs()
    assert alone.num_preemptions == 0


def test_b13_nobody_is_recomputed_over_and_over(everywhere: Limits) -> None:
    h = Harness(everywhere, num_blocks=20, block_size=16, max_num_batched_tokens=32, max_seq_len=512)
    h.submit("A", prompt(64, 1), 120, ignore_eos=True)
    h.submit("B", prompt(200, 2), 60, ignore_eos=True)
    h.run_to_end()
    h.check_outputs()
    check_preemptions(h)
    computed: Counter[str] = Counter()
    for plan in h.plans:
        for seq, count in zip(plan.rows, plan.num_tokens, strict=True):
            computed[seq.request.request_id] += count
    for name, seq in h.sequences.items():
        assert seq.num_preemptions <= 2
        assert computed[name] <= 3 * seq.max_len


@pytest.mark.parametrize("admission", list(Admission))
def test_under_pressure_only_the_optimistic_preempt_much_and_a_reservation_never(
    admission: Admission,
) -> None:
    rng = random.Random(2)
    h = Harness(Limits(admission=admission, watermark=0.0), num_blocks=40, block_size=4)
    for i in range(120):
        h.submit(f"r{i}", prompt(rng.randrange(1, 30), i), rng.randrange(5, 50), ignore_eos=True)
    h.run_to_end()
    h.check_outputs()
    allowed = {Admission.RESERVE: 0, Admission.FORECAST: 40, Admission.OPTIMISTIC: 10_000}
    assert h.core.counters.preemptions <= allowed[admission]
    if admission is Admission.OPTIMISTIC:
        assert h.core.counters.preemptions >= 10, "the load presses"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("admission", [Admission.FORECAST, Admission.OPTIMISTIC])
def test_nobody_goes_for_want_of_blocks_before_a_less_important_one_that_has_just_come(
    admission: Admission, seed: int
) -> None:
    """Those short of a block are put off meanwhile, and not for long: the newcomer's prompt is computed."""
    rng = random.Random(seed)
    limits = Limits(admission=admission, watermark=0.0, window=rng.choice([1, 2]))
    h = Harness(limits, num_blocks=30, block_size=4, max_num_seqs=8, max_num_batched_tokens=8)
    state = h.core.executors[EXECUTOR]
    for i in range(60):
        length, priority = rng.randrange(1, 60), rng.choice([0, 0, 2, 5])
        h.submit(f"r{i}", prompt(length, i), rng.randrange(1, 40), priority=priority, ignore_eos=True)
    num_before = idle = won_before = 0
    while not h.core.is_idle:
        newcomers = [seq for seq in state.running.values() if not seq.has_progressed]
        h.step()
        if h.core.counters.preemptions > num_before:
            num_before = h.core.counters.preemptions
            gone = [leaver.seq for leaver in h.plans[-1].left if leaver.reason is None]
            staying = [seq for seq in newcomers if seq in h.plans[-1].rows and seq.executor_id]
            for seq in gone:
                assert not any(other.request.priority > seq.request.priority for other in staying)
        won = sum(seq.num_output_tokens for seq in h.sequences.values())
        idle, won_before = (idle + 1 if won == won_before else 0), won
        assert idle <= 120 / 8 + 5, "longer than all prompts that fit take together"
    assert num_before >= 1, "the load presses"
    h.check_outputs()


# --- 5. chunked prefill ---------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [15, 16, 17, 33, 50])
def test_b22_the_first_token_comes_with_the_last_chunk(everywhere: Limits, length: int) -> None:
    h = Harness(everywhere, max_num_batched_tokens=16)
    seq = h.submit("r", prompt(length), 5, ignore_eos=True)
    num_results = 0
    while seq.num_output_tokens == 0:
        h.step()
        num_results += 1
    assert num_results == -(-length // 16)
    h.run_to_end()
    h.check_outputs()


def test_b23_b39_a_chunked_prompt_waits_while_decodes_take_the_budget(everywhere: Limits) -> None:
    h = Harness(everywhere, max_num_seqs=9, max_num_batched_tokens=8)
    for i in range(8):
        h.submit(f"d{i}", prompt(1, i), 8, ignore_eos=True)
    h.step()
    h.submit("A", prompt(40), 4, ignore_eos=True)
    h.run_to_end()
    h.check_outputs()
    assert max(h.executor.tokens_per_step) <= 8


def test_b24_no_gap_of_a_running_stream_grows_with_a_newcomers_prompt(everywhere: Limits) -> None:
    for length in (1000, 4000):
        h = Harness(everywhere, num_blocks=512, block_size=16, max_num_batched_tokens=64, max_seq_len=8192)
        streams = [h.submit(f"d{i}", prompt(2, i), 150, ignore_eos=True) for i in range(4)]
        for _ in range(4):
            h.step()
        h.submit("long", prompt(length), 2, ignore_eos=True)
        for _ in range(20):
            before = [seq.num_output_tokens for seq in streams]
            h.step()
            assert [seq.num_output_tokens for seq in streams] == [count + 1 for count in before]


# --- 6. giving up ---------------------------------------------------------------------------------------


def test_b26_what_is_given_up_while_it_waits_is_never_computed(everywhere: Limits) -> None:
    h = Harness(everywhere, max_num_seqs=1)
    h.submit("A", prompt(4), 10, ignore_eos=True)
    for name in "BCD":
        h.submit(name, prompt(4), 3, ignore_eos=True)
    h.step()
    for name in "BC":
        h.core.cancel(h.sequences[name].request.key, FinishReason.ABORT, h.now)
    h.run_to_end()
    assert {seq.request.request_id for plan in h.plans for seq in plan.rows} == {"A", "D"}


def test_b27_hundreds_of_broken_streams_leave_nothing_behind(everywhere: Limits) -> None:
    h = Harness(everywhere, max_num_seqs=4)
    for i in range(100):
        seqs = [h.submit(f"r{i}.{j}", prompt(5, i + j), 50, ignore_eos=True) for j in range(8)]
        for _ in range(3):
            h.step()
        for seq in seqs:
            h.core.cancel(seq.request.key, FinishReason.ABORT, h.now)
    h.run_to_end()
    assert_empty(h)


def test_b29_all_choices_of_a_request_are_given_up_together(everywhere: Limits) -> None:
    h = Harness(everywhere)
    for i in range(50):
        choices = [
            h.submit(f"r{i}.{j}", prompt(8, i), 40, sample_index=j, group=i, ignore_eos=True)
            for j in range(4)
        ]
        for _ in range(5):
            h.step()
        for seq in choices:
            h.core.cancel(seq.request.key, FinishReason.ABORT, h.now)
        h.run_to_end()
    assert_empty(h)


def test_b30_giving_up_what_does_not_live_leaves_no_trace(everywhere: Limits) -> None:
    h = Harness(everywhere)
    ended = [h.submit(f"r{i}", prompt(2, i), 2) for i in range(20)]
    h.run_to_end()
    for i in range(1000):
        assert h.core.cancel(i.to_bytes(16), FinishReason.ABORT, h.now) is None
    for seq in ended:
        assert h.core.cancel(seq.request.key, FinishReason.ABORT, h.now) is None
    assert_empty(h)


def _waiting(h: Harness) -> Sequence:
    for i in range(2):
        h.submit(f"runs{i}", prompt(4, i), 60, ignore_eos=True)
    h.step()
    return h.submit("A", prompt(20, 7), 20, ignore_eos=True)


def _waiting_for_a_prefix(h: Harness) -> Sequence:
    h.submit("leader", prompt(60, 7), 5, ignore_eos=True)
    h.step()
    seq = h.submit("A", prompt(60, 7), 20, ignore_eos=True)
    h.step()
    return seq


def _between_chunks(h: Harness) -> Sequence:
    seq = h.submit("A", prompt(60, 7), 20, ignore_eos=True)
    h.step()
    return seq


def _decoding(h: Harness) -> Sequence:
    seq = h.submit("A", prompt(4, 7), 20, ignore_eos=True)
    for _ in range(4):
        h.step()
    return seq


def _displaced(h: Harness) -> Sequence:
    seq = h.submit("A", prompt(4, 7), 60, priority=5, ignore_eos=True)
    for _ in range(12):
        h.step()
    for i in range(2):
        h.submit(f"high{i}", prompt(4, i), 9, ignore_eos=True)
    while seq.state is State.RUNNING:
        h.step()
    return seq


@pytest.mark.parametrize(
    ("reach", "reason"),
    [
        (_waiting, FinishReason.ABORT),
        (_waiting_for_a_prefix, FinishReason.DEADLINE),
        (_between_chunks, FinishReason.ABORT),
        (_decoding, FinishReason.STOP),
        (_displaced, FinishReason.DEADLINE),
    ],
)
def test_b31_given_up_in_any_state_everything_is_given_back_at_once(
    everywhere: Limits, reach: object, reason: FinishReason
) -> None:
    h = Harness(everywhere, max_num_seqs=2, max_num_batched_tokens=16)
    seq: Sequence = reach(h)  # type: ignore[operator]
    held = h.core.executors[EXECUTOR].blocks.num_private(seq.block_table)
    num_free = h.core.executors[EXECUTOR].blocks.num_free
    assert h.core.cancel(seq.request.key, reason, h.now) is seq
    assert h.core.executors[EXECUTOR].blocks.num_free == num_free + held
    assert seq.block_table == []
    output = list(seq.output_token_ids())
    del h.sequences["A"]
    h.run_to_end()
    h.check_outputs()
    assert list(seq.output_token_ids()) == output == expected_output(seq.request)[0][: len(output)]
    assert_empty(h)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_b32_no_block_stays_away_whatever_the_length(everywhere: Limits, prefix_caching: bool) -> None:
    limits = Limits(
        policy=everywhere.policy,
        admission=everywhere.admission,
        window=everywhere.window,
        prefix_caching=prefix_caching,
    )
    h = Harness(limits)
    blocks = h.core.executors[EXECUTOR].blocks
    for length in range(1, 61):
        h.submit(f"r{length}", prompt(length, length % 3), 1 + length % 5)
        h.run_to_end()
        assert blocks.num_free == blocks.num_blocks
    assert_empty(h)


@pytest.mark.parametrize("block_size", [1, 16])
def test_b33_a_preemption_gives_back_exactly_what_its_victim_held_alone(
    everywhere: Limits, block_size: int
) -> None:
    h = Harness(everywhere, num_blocks=max(2, 96 // block_size), block_size=block_size, max_seq_len=96)
    state = h.core.executors[EXECUTOR]
    leave = h.core._leave

    def checked(state_: object, seq: Sequence, *args: object, **fields: object) -> None:
        num_free, alone = state.blocks.num_free, state.blocks.num_private(seq.block_table)
        leave(state_, seq, *args, **fields)  # type: ignore[arg-type]
        assert state.blocks.num_free == num_free + alone

    h.core._leave = checked  # type: ignore[method-assign, assignment]
    for i in range(6):
        h.submit(f"r{i}", prompt(13 + i, i % 5), 40, ignore_eos=True)
    h.run_to_end()
    h.check_outputs()
    check_preemptions(h)
    assert_empty(h)


def assert_empty(h: Harness) -> None:
    """Nothing is held, counted or remembered for anybody."""
    core = h.core
    state = core.executors[EXECUTOR]
    assert core.is_idle
    assert core.num_running == len(core.waiting) == core.waiting.num_tokens == 0
    assert state.blocks.num_free == state.blocks.num_blocks
    assert state.num_running_of == {}
    assert state.cache._computing == {}
    for tenant in core.tenants:
        counts = (tenant.num_running, tenant.num_blocks, tenant.num_waiting, tenant.num_waiting_tokens)
        assert counts == (0, 0, 0, 0)
    core.expire(h.now + 1e6)
    assert core.sequences == {}
    assert core.next_timer is None


# --- 7. lengths and budgets -----------------------------------------------------------------------------


def test_b34_b35_a_sum_of_prompt_and_output_up_to_the_limit_is_served(everywhere: Limits) -> None:
    h = Harness(everywhere, max_seq_len=128)
    for length, max_tokens in [(127, 1), (100, 27), (100, 28), (1, 127)]:
        seq = h.submit(f"r{length}.{max_tokens}", prompt(length), max_tokens, ignore_eos=True)
        h.run_to_end()
        assert seq.num_output_tokens == max_tokens
    for length, max_tokens in [(128, 1), (100, 29), (129, 1), (300, 4)]:
        with pytest.raises(RefusedError, match=f"their sum {length + max_tokens} must be at most 128"):
            h.submit("r", prompt(length), max_tokens)
    h.submit("after", prompt(5), 3)
    h.run_to_end()
    h.check_outputs()


def test_b38_a_budget_of_one_token_works(everywhere: Limits) -> None:
    h = Harness(everywhere, max_num_batched_tokens=1)
    for i in range(3):
        h.submit(f"r{i}", prompt(20, i), 6)
    h.run_to_end()
    h.check_outputs()


def test_b39_no_step_exceeds_its_budget(everywhere: Limits) -> None:
    h = Harness(everywhere, max_num_batched_tokens=100, num_blocks=256)
    for i in range(10):
        h.submit(f"r{i}", prompt(33, i), 3, priority=i % 3)
    h.run_to_end()
    h.check_outputs()
    assert max(h.executor.tokens_per_step) <= 100


def test_what_is_too_late_goes_behind_what_can_still_be_done_and_is_not_given_up() -> None:
    h = Harness(
        Limits(window=1, watermark=0.0, policy=Policy.DEADLINE, admission=Admission.OPTIMISTIC),
        max_num_seqs=1,
    )
    first = h.submit("running", [1, 2, 3], 20, ignore_eos=True)
    for _ in range(5):
        h.step()
    late = h.submit("late", [4, 5, 6], 4, ignore_eos=True, deadline=h.now + 2.0)
    can = h.submit("can", [7, 8, 9], 4, ignore_eos=True, deadline=h.now + 1000.0)
    h.now += 1.9999  # it has waited until it was too late
    while first.state is not State.FINISHED:
        h.step()
    h.step()
    assert can.state is State.RUNNING
    assert late.state is State.WAITING
    h.run_to_end()
    h.check_outputs()

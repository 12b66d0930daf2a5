"""Core and session under random operations: the invariants of scheduler/audit after each, and the laws.

- Every sequence ends exactly once; a finished one has the undisturbed output.
- The checking executor sees no broken rule of the step protocol, and no wrong context.
- Where whole lengths are reserved nothing is preempted; nobody is displaced more than a few times.
- Tenants' counts are those of their sequences; their KV block-seconds add up exactly.
- Every sequence's time line sums to the time since it came in.
- Once nothing disturbs any more, everything ends within a bound.

Times are multiples of 1/8 second, so that sums are exact.
"""

import dataclasses
import itertools
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from scheduler import audit
from scheduler.batching import Batching
from scheduler.door import RefusedError
from scheduler.policy import MAX_DISPLACEMENTS, Admission, Limits
from scheduler.sequence import FinishReason, Sequence, State, StatusCode
from scheduler.tenants import TenantLimits
from scheduler.waiting import Policy
from tests.rig.checking_executor import expected_output
from tests.scheduler.harness import EXECUTOR, Harness

CLIENT_ENDS = [FinishReason.STOP, FinishReason.ABORT, FinishReason.DEADLINE]
TENANTS = {
    "free": TenantLimits(),
    "heavy": TenantLimits(weight=3.0),
    "small": TenantLimits(
        max_running=2, max_blocks=8, max_queued=4, max_queued_tokens=60, requests_per_minute=60
    ),
}


class CoreMachine(RuleBasedStateMachine):
    """One executor that comes and goes; results late by up to a window."""

    def __init__(self, policy: Policy, admission: Admission, window: int) -> None:
        super().__init__()
        self.policy, self.admission, self.window = policy, admission, window
        self.all: list[Sequence] = []
        self.ended_at: dict[Sequence, float] = {}
        self.block_seconds: defaultdict[str, float] = defaultdict(float)
        self.name = 0

    @initialize(
        num_blocks=st.integers(6, 24),
        block_size=st.sampled_from([1, 3, 4, 8]),
        seats=st.integers(1, 6),
        budget=st.sampled_from([1, 5, 16, 64]),
        batching=st.sampled_from([Batching.ITERATION] * 6 + [Batching.REQUEST, Batching.REQUEST_PADDED]),
        watermark=st.sampled_from([0.0, 0.1]),
        prefix_caching=st.sampled_from([True, True, False]),
        aging=st.sampled_from([None, 10.0, 0.5]),
        max_queued=st.sampled_from([None, None, 3]),
        max_queued_tokens=st.sampled_from([None, None, 50]),
        num_speculative_tokens=st.sampled_from([0, 1, 3, 8]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        seats: int,
        budget: int,
        batching: Batching,
        watermark: float,
        prefix_caching: bool,
        aging: float | None,
        max_queued: int | None,
        max_queued_tokens: int | None,
        num_speculative_tokens: int,
    ) -> None:
        self.h = Harness(
            Limits(
                window=self.window,
                policy=self.policy,
                admission=self.admission,
                watermark=watermark,
                aging_seconds=aging,
                orphan_grace_seconds=5.0,
                prefix_caching=prefix_caching,
                max_queued=max_queued,
                max_queued_tokens=max_queued_tokens,
                num_speculative_tokens=num_speculative_tokens,
                tenants=TENANTS,
            ),
            batching,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
            features=frozenset({"draft_tokens"}),
        )

    @property
    def attached(self) -> bool:
        return EXECUTOR in self.h.core.executors

    # --- clients ------------------------------------------------------------------------------------

    @rule(
        length=st.integers(1, 24),
        max_tokens=st.integers(1, 30),
        priority=st.sampled_from([0, 0, 0, -1, 1, 5]),
        lifetime=st.sampled_from([None, None, None, 3.0, 20.0, -1.0]),
        ignore_eos=st.booleans(),
        salt=st.sampled_from([0, 0, 0, 1, 30]),
        cache_salt=st.sampled_from(["", "", "red"]),
        tenant=st.sampled_from(["free", "heavy", "small"]),
        waited=st.sampled_from([0.0, 0.0, 30.0]),
    )
    def submit(  # one argument for each thing that can differ
        self,
        length: int,
        max_tokens: int,
        priority: int,
        lifetime: float | None,
        ignore_eos: bool,
        salt: int,
        cache_salt: str,
        tenant: str,
        waited: float,
    ) -> None:
        self.name += 1
        prompt = [(5 * i + salt) % 90 for i in range(length)]
        fields = {
            "priority": priority,
            "deadline": None if lifetime is None else self.h.now + lifetime,
            "ignore_eos": ignore_eos,
            "cache_salt": cache_salt,
            "tenant": tenant,
            "arrival": self.h.now - waited,
        }
        try:
            self.all.append(self.h.submit(f"r{self.name}", prompt, max_tokens, **fields))
        except RefusedError as error:
            self._check_refusal(error, tenant, length, max_tokens)

    def _check_refusal(self, error: RefusedError, tenant: str, length: int, max_tokens: int) -> None:
        limits = self.h.core.limits
        match error.status_code:
            case StatusCode.UNAVAILABLE:
                assert not self.attached
            case StatusCode.INVALID_ARGUMENT:
                too_long = length + max_tokens > self.h.core.max_total_tokens
                assert too_long or length > (limits.max_queued_tokens or 10**9)
            case StatusCode.RESOURCE_EXHAUSTED:
                assert error.retry_after_seconds is not None
                bounded = limits.max_queued is not None or limits.max_queued_tokens is not None
                assert bounded or tenant == "small" or self.policy is Policy.DEADLINE
            case other:
                raise AssertionError(f"refused with {other}: {error}")

    @precondition(lambda self: self.all)
    @rule(data=st.data(), reason=st.sampled_from(CLIENT_ENDS))
    def cancel(self, data: st.DataObject, reason: FinishReason) -> None:
        key = data.draw(st.sampled_from(self.all)).request.key
        seq = self.h.core.sequences.get(key)
        was_over = seq is None or seq.state is State.FINISHED
        assert self.h.core.cancel(key, reason, self.h.now) is (None if was_over else seq)
        assert seq is None or seq.block_table == []

    @precondition(lambda self: self.all)
    @rule(data=st.data(), cut=st.integers(0, 3))
    def resubmit(self, data: st.DataObject, cut: int) -> None:
        """A router comes back with the ids it has; in the end it holds the undisturbed output."""
        seq = data.draw(st.sampled_from(self.all))
        have = seq.output_token_ids()
        have = have[: max(0, len(have) - cut)]
        request = dataclasses.replace(seq.request, accepted_before=True)
        again = self.h.core.submit(request, have, now=self.h.now)  # never refused: it was taken in before
        if again is not seq:
            self.all.append(again)

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def orphan(self, data: st.DataObject) -> None:
        self.h.core.orphan(data.draw(st.sampled_from(self.all)), self.h.now)

    @rule(seconds=st.sampled_from([0.125, 0.125, 1.0, 7.0, 70.0, 100_000.0]))
    def clock(self, seconds: float) -> None:
        for state in self.h.core.executors.values():
            for seq in state.running.values():
                self.block_seconds[seq.request.tenant] += len(seq.block_table) * seconds
        self.h.now += seconds
        self.h.core.expire(self.h.now)

    # --- iterations ---------------------------------------------------------------------------------

    @precondition(lambda self: self.attached)
    @rule()
    def plan(self) -> None:
        self.h.plan()

    @precondition(lambda self: self.attached and self.h.executor.plans)
    @rule(fail=st.sampled_from([None] * 8 + [0]))
    def result(self, fail: int | None) -> None:
        self.h.result(fail=fail)

    @precondition(lambda self: self.attached)
    @rule(count=st.integers(1, 10))
    def steps(self, count: int) -> None:
        for _ in range(count):
            before = len(self.h.plans)
            self.h.step()
            if not self.h.core.is_idle:
                moved = self.h.plans[before:] or self.h.executor.plans or self.h.plan() is not None
                assert moved, "something runs or waits, and a step moved nothing"

    # --- executors ----------------------------------------------------------------------------------

    @precondition(lambda self: self.attached)
    @rule()
    def detach(self) -> None:
        self.h.core.detach(EXECUTOR, self.h.now)

    @precondition(lambda self: not self.attached)
    @rule()
    def attach(self) -> None:
        self.h.attach()

    # --- laws ---------------------------------------------------------------------------------------

    @invariant()
    def audit(self) -> None:
        if not hasattr(self, "h"):
            return
        audit.check(self.h.core)
        for seq in self.all:
            whole, reason = expected_output(seq.request, seq.output_token_ids()[: seq.num_resumed_tokens])
            output = list(seq.output_token_ids())
            assert output == whole[: len(output)]
            if seq.finish is not None and seq.finish.reason is FinishReason.LENGTH:
                assert (output, FinishReason.LENGTH) == (whole, reason)
            assert seq.num_displacements <= MAX_DISPLACEMENTS

    @invariant()
    def nothing_reserved_is_preempted(self) -> None:
        if not hasattr(self, "h") or self.h.core.batching is Batching.REQUEST_PADDED:
            return  # padding has no length to reserve
        if self.admission is Admission.RESERVE:
            assert self.h.core.counters.preemptions == 0

    @invariant()
    def nobody_is_kept_out_of_the_queue_by_nobody(self) -> None:
        if not hasattr(self, "h"):
            return
        core = self.h.core
        alive = [seq for seq in core.sequences.values() if seq.state is not State.FINISHED]
        followers = {item.seq for seq in alive for item in seq.followers}
        followers |= {item[-1] for seq in alive if seq.inherited for item in seq.inherited.heap}
        for seq in core.waiting.parked:
            assert seq in followers or core.inquiry.holds(seq) or core.stranded.holds(seq)

    @invariant()
    def tenants_are_their_sequences(self) -> None:
        if not hasattr(self, "h"):
            return
        core = self.h.core
        running = [seq for state in core.executors.values() for seq in state.running.values()]
        for tenant in core.tenants:
            mine = [seq for seq in running if seq.tenant is tenant]
            assert tenant.num_running == len(mine)
            assert tenant.num_blocks == sum(len(seq.block_table) for seq in mine)
            waiting = [seq for seq in core.waiting if seq.tenant is tenant]
            assert tenant.num_waiting == len(waiting)
            assert tenant.num_waiting_tokens == sum(len(seq.token_ids) for seq in waiting)
            tenant.meter(0, self.h.now)
            assert tenant.block_seconds == self.block_seconds[tenant.name]
            assert len(mine) <= (tenant.limits.max_running or len(mine))
            if len(mine) > 1 and core.batching is not Batching.REQUEST_PADDED:
                assert tenant.num_blocks <= (tenant.limits.max_blocks or tenant.num_blocks)

    @invariant()
    def time_lines_sum_to_the_time_since_arrival(self) -> None:
        if not hasattr(self, "h"):
            return
        now = self.h.now
        for seq in self.all:
            assert seq.time_line is not None
            if seq.state is State.FINISHED:
                end = self.ended_at.setdefault(seq, now)
                entries = seq.time_line.entries
            else:
                end = now
                entries = seq.time_line.so_far(now, self.h.core.clocks)
            assert sum(entry.duration for entry in entries) == end - seq.request.arrival
            for before, after in itertools.pairwise(entries):
                assert before.start + before.duration == after.start

    def teardown(self) -> None:
        if not hasattr(self, "h"):
            return
        if not self.attached:
            self.h.attach()
        self.h.run_to_end(max_steps=20_000)
        state = self.h.core.executors[EXECUTOR]
        assert state.blocks.num_free == state.blocks.num_blocks
        assert all(seq.state is State.FINISHED for seq in self.all)
        assert all(not tenant.has_work for tenant in self.h.core.tenants)
        assert self.h.core.waiting.num_tokens == 0
        self.h.now += 1000.0
        self.h.core.expire(self.h.now)
        assert self.h.core.sequences == self.h.core._by_request == {}
        assert self.h.core.next_timer is None


def run(policy: Policy, admission: Admission, window: int, *, examples: int, steps: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call, unused-ignore]
        lambda: CoreMachine(policy, admission, window),  # type: ignore[arg-type, return-value, unused-ignore]
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


ALL = list(itertools.product(Policy, Admission, [1, 2]))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("policy", "admission", "window"), ALL)
def test_whatever_comes_every_law_holds_and_everything_ends(
    policy: Policy, admission: Admission, window: int
) -> None:
    """18 kinds x 70 examples x 40 operations: 50,400."""
    run(policy, admission, window, examples=70, steps=40)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("policy", "admission", "window"), ALL)
def test_whatever_comes_for_long_every_law_holds_and_everything_ends(
    policy: Policy, admission: Admission, window: int
) -> None:
    """18 kinds x 100 examples x 100 operations: 180,000."""
    run(policy, admission, window, examples=100, steps=100)

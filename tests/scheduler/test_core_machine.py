"""Core and session under random operations: the invariants of scheduler/audit after each, and the laws.

- Every sequence ends exactly once; a finished one has the undisturbed output.
- The checking executor sees no broken rule of the step protocol, and no wrong context.
- Once nothing disturbs any more, everything ends within a bound.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler import audit
from scheduler.batching import Batching
from scheduler.door import RefusedError
from scheduler.policy import Limits
from scheduler.sequence import FinishReason, Sequence, State
from tests.rig.checking_executor import expected_output
from tests.scheduler.harness import EXECUTOR, Harness

CLIENT_ENDS = [FinishReason.STOP, FinishReason.ABORT, FinishReason.DEADLINE]


class CoreMachine(RuleBasedStateMachine):
    """One executor that comes and goes; results late by up to a window."""

    window = 1

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Sequence] = []
        self.failed: set[Sequence] = set()
        self.ended: list[Sequence] = []
        self.name = 0

    @initialize(
        num_blocks=st.integers(6, 24),
        block_size=st.sampled_from([1, 3, 4, 8]),
        seats=st.integers(1, 6),
        budget=st.sampled_from([1, 5, 16, 64]),
        batching=st.sampled_from([Batching.ITERATION] * 4 + [Batching.REQUEST, Batching.REQUEST_PADDED]),
        watermark=st.sampled_from([0.0, 0.1]),
        prefix_caching=st.sampled_from([True, True, False]),
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
    ) -> None:
        self.h = Harness(
            Limits(
                window=self.window,
                watermark=watermark,
                orphan_grace_seconds=5.0,
                prefix_caching=prefix_caching,
            ),
            batching,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
        )

    @property
    def attached(self) -> bool:
        return EXECUTOR in self.h.core.executors

    @rule(
        length=st.integers(1, 24),
        max_tokens=st.integers(1, 30),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        lifetime=st.sampled_from([None, None, None, 3.0, 20.0]),
        ignore_eos=st.booleans(),
        salt=st.sampled_from([0, 0, 0, 1, 30]),
        cache_salt=st.sampled_from(["", "", "red"]),
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
    ) -> None:
        self.name += 1
        prompt = [(5 * i + salt) % 90 for i in range(length)]
        deadline = None if lifetime is None else self.h.now + lifetime
        fields = {
            "priority": priority,
            "deadline": deadline,
            "ignore_eos": ignore_eos,
            "cache_salt": cache_salt,
        }
        try:
            self.all.append(self.h.submit(f"r{self.name}", prompt, max_tokens, **fields))
        except RefusedError:
            assert not self.attached or length + max_tokens > self.h.core.max_total_tokens

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
        try:
            again = self.h.core.submit(seq.request, have, now=self.h.now)
        except RefusedError:
            return
        if again is not seq:
            self.all.append(again)

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def orphan(self, data: st.DataObject) -> None:
        self.h.core.orphan(data.draw(st.sampled_from(self.all)), self.h.now)

    @rule(seconds=st.sampled_from([0.1, 1.0, 7.0, 70.0]))
    def clock(self, seconds: float) -> None:
        self.h.now += seconds
        self.h.core.expire(self.h.now)

    @precondition(lambda self: self.attached)
    @rule()
    def plan(self) -> None:
        self.h.plan()

    @precondition(lambda self: self.attached and self.h.executor.plans)
    @rule(fail=st.sampled_from([None] * 8 + [0]))
    def result(self, fail: int | None) -> None:
        ended = self.h.result(fail=fail)
        self.failed |= {seq for seq in ended if seq.finish and seq.finish.reason is FinishReason.ERROR}

    @precondition(lambda self: self.attached)
    @rule()
    def step(self) -> None:
        before = (len(self.h.plans), len(self.ended))
        self.h.step()
        if not self.h.core.is_idle:
            moved = bool(self.h.plans[before[0] :]) or self.h.executor.plans or self.h.plan() is not None
            assert moved, "something runs or waits, and a step moved nothing"

    @precondition(lambda self: self.attached)
    @rule()
    def detach(self) -> None:
        self.h.core.detach(EXECUTOR, self.h.now)

    @precondition(lambda self: not self.attached)
    @rule()
    def attach(self) -> None:
        self.h.attach()

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

    def teardown(self) -> None:
        if not hasattr(self, "h"):
            return
        if not self.attached:
            self.h.attach()
        self.h.run_to_end(max_steps=20_000)
        state = self.h.core.executors[EXECUTOR]
        assert state.blocks.num_free == state.blocks.num_blocks
        assert all(seq.state is State.FINISHED for seq in self.all)
        self.h.now += 1000.0
        self.h.core.expire(self.h.now)
        assert self.h.core.sequences == {}
        assert self.h.core.next_timer is None


class WindowTwoMachine(CoreMachine):
    window = 2


# 2 windows x 100 examples x 50 operations: 10,000.
_settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestWindowOne = pytest.mark.timeout(300)(CoreMachine.TestCase)
TestWindowOne.settings = _settings
TestWindowTwo = pytest.mark.timeout(300)(WindowTwoMachine.TestCase)
TestWindowTwo.settings = _settings

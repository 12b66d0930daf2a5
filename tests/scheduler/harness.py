"""A core and a checking executor in one thread, with a clock that the test moves."""

from array import array
from typing import Any

from scheduler import audit
from scheduler.batching import Batching
from scheduler.core import SchedulerCore
from scheduler.plan import BatchPlan, Capacity
from scheduler.policy import Admission, Limits
from scheduler.sequence import Request, Sequence, State
from tests.rig.checking_executor import CheckingExecutor, capacity, expected_output

EXECUTOR = "executor"


class Harness:
    def __init__(
        self, limits: Limits | None = None, batching: Batching = Batching.ITERATION, **capacities: Any
    ) -> None:
        self.capacity: Capacity = capacity(**capacities)
        self.core = SchedulerCore(
            limits or Limits(watermark=0.0, admission=Admission.OPTIMISTIC),
            batching,
            padding_sampling=b"padding",
        )
        self.requests: dict[bytes, Request] = {}
        self.sequences: dict[str, Sequence] = {}
        self.now = 0.0
        self.epoch = 0
        self.plans: list[BatchPlan] = []
        self.attach()

    def attach(self) -> None:
        self.epoch += 1
        self.executor = CheckingExecutor(self.capacity, self.epoch, self.requests)
        self.core.attach(EXECUTOR, self.epoch, self.capacity, self.now)

    def request(self, name: str, prompt: list[int], max_tokens: int, **fields: object) -> Request:
        key = name.encode().ljust(16, b"\0")
        request = Request(
            key=key,
            request_id=name,
            prompt_token_ids=array("I", prompt),
            sampling=b"sampling of " + name.encode(),
            max_tokens=max_tokens,
            **({"arrival": self.now} | fields),  # type: ignore[arg-type]
        )
        self.requests[request.sampling] = request
        return request

    def submit(self, name: str, prompt: list[int], max_tokens: int, **fields: object) -> Sequence:
        seq = self.core.submit(self.request(name, prompt, max_tokens, **fields), now=self.now)
        self.sequences[name] = seq
        return seq

    def plan(self) -> BatchPlan | None:
        """Schedules once and sends the plan."""
        plan = self.core.schedule(EXECUTOR, self.now)
        if plan is not None:
            self.executor.send(plan)
            self.plans.append(plan)
        audit.check(self.core)
        return plan

    def result(self, *, fail: int | None = None) -> list[Sequence]:
        """Runs the oldest plan and applies its result; returns who ended."""
        outcome = self.core.update(EXECUTOR, self.executor.run(fail=fail), self.now)
        audit.check(self.core)
        return outcome.ended

    def step(self) -> list[Sequence]:
        """Fills the window, then applies one result."""
        while self.plan() is not None:
            pass
        return self.result() if self.executor.plans else []

    def members(self) -> set[str]:
        """Names of those with a row in the newest plan."""
        return {seq.request.request_id for seq in self.plans[-1].rows if not seq.is_padding}

    def run_to_end(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            self.step()
            if self.core.is_idle and not self.executor.plans and self.plan() is None:
                return
        raise AssertionError(f"not at an end after {max_steps} steps")

    def check_outputs(self) -> None:
        """Every sequence ended with the undisturbed output."""
        for seq in self.sequences.values():
            assert seq.state is State.FINISHED
            assert seq.finish is not None
            assert (list(seq.output_token_ids()), seq.finish.reason) == expected_output(seq.request)

"""A core and several checking executors in one thread; steps take time on a clock that the test moves."""

import random
from array import array
from collections.abc import Callable

from scheduler import audit
from scheduler.core import SchedulerCore
from scheduler.plan import BatchPlan
from scheduler.policy import Admission, Limits
from scheduler.sequence import Request, Sequence, State
from tests.rig.checking_executor import CheckingExecutor, capacity, expected_output


class Fleet:
    """Executors by name. A step of n tokens lasts 100 + 10 n microseconds, as the executor reports it."""

    def __init__(self, limits: Limits | None = None, seed: int = 0) -> None:
        self.core = SchedulerCore(limits or Limits(watermark=0.0, admission=Admission.OPTIMISTIC))
        self.requests: dict[bytes, Request] = {}
        self.sequences: list[Sequence] = []
        self.executors: dict[str, CheckingExecutor] = {}
        self.done_at: dict[str, list[float]] = {}
        self.now = 0.0
        self.dies_of: Callable[[BatchPlan], bool] = lambda _: False
        self.num_deaths = 0
        self.frozen: set[str] = set()
        self._capacities: dict[str, dict[str, int]] = {}
        self._epoch = 0
        self._rng = random.Random(seed)

    def attach(self, name: str, **capacities: int) -> None:
        self._epoch += 1
        self._capacities[name] = capacities
        taken = capacity(**capacities)
        self.executors[name] = CheckingExecutor(taken, self._epoch, self.requests)
        self.done_at[name] = []
        self.core.attach(name, self._epoch, taken, self.now)

    def lose(self, name: str, *, is_crash: bool = False) -> list[Sequence]:
        del self.executors[name]
        self.frozen.discard(name)
        ended = self.core.detach(name, self.now, is_crash=is_crash)
        audit.check(self.core)
        return ended

    def submit(self, name: str, prompt: list[int], max_tokens: int, **fields: object) -> Sequence:
        sampling = f"sampling of {name}".encode()
        request = Request(
            key=name.encode().ljust(16, b"\0"),
            request_id=name,
            prompt_token_ids=array("I", prompt),
            sampling=sampling,
            max_tokens=max_tokens,
            **({"arrival": self.now, "ignore_eos": True} | fields),  # type: ignore[arg-type]
        )
        self.requests[sampling] = request
        seq = self.core.submit(request, now=self.now)
        self.sequences.append(seq)
        return seq

    def plan(self, name: str) -> list[BatchPlan]:
        """One turn of one executor: all the plans it gets now."""
        plans = []
        while (plan := self.plan_once(name)) is not None:
            plans.append(plan)
        return plans

    def plan_once(self, name: str) -> BatchPlan | None:
        plan = self.core.schedule(name, self.now)
        if plan is not None:
            self.executors[name].send(plan)
            begins = max([self.now, *self.done_at[name][-1:]])
            self.done_at[name].append(begins + (100 + 10 * sum(plan.num_tokens)) / 1e6)
        audit.check(self.core)
        return plan

    def ranges(self, plan: BatchPlan) -> list[tuple[Sequence, int, int]]:
        """Each row of the plan that runs: from which position of its sequence to which."""
        state = next(item for item in self.core.executors.values() if plan in item.session.unanswered)
        rows = []
        for seq, seq_id, num_tokens in zip(plan.rows, plan.seq_ids, plan.num_tokens, strict=True):
            if seq.seq_id == seq_id:
                behind = [other for other in state.session.unanswered if other.step_id > plan.step_id]
                end = seq.num_computed_tokens - sum(
                    count
                    for other in behind
                    for other_id, count in zip(other.seq_ids, other.num_tokens, strict=True)
                    if other_id == seq_id
                )
                rows.append((seq, end - num_tokens, end))
        return rows

    def turn(self) -> bool:
        """Everybody plans, in any order; then the step that ends first answers, or kills.

        False when none runs.
        """
        names = sorted(self.executors)
        self._rng.shuffle(names)
        for name in names:
            self.plan(name)
        due = [(times[0], name) for name, times in self.done_at.items() if times and name not in self.frozen]
        if not due:
            return False
        self.now, name = max(self.now, min(due)[0]), min(due)[1]
        if self.dies_of(self.executors[name].plans[0]):
            self.num_deaths += 1
            self.lose(name, is_crash=True)
            self.attach(name, **self._capacities[name])
            return True
        self.done_at[name].pop(0)
        self.core.update(name, self.executors[name].run(), self.now)
        audit.check(self.core)
        return True

    def run(self, max_turns: int = 20_000) -> None:
        """Until all have ended."""
        for _ in range(max_turns):
            if all(seq.state is State.FINISHED for seq in self.sequences):
                return
            moved = self.turn()
            self.now += 0.0 if moved else 0.01
        raise AssertionError(f"not at an end after {max_turns} turns")

    def check_outputs(self, but: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        for seq in self.sequences:
            assert seq.finish is not None
            if seq.request.request_id not in but:
                assert (list(seq.output_token_ids()), seq.finish.reason) == expected_output(seq.request)

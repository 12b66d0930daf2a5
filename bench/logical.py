"""The real scheduler core under logical time: one executor whose steps take a base and a price a token.

No process, no model, no clock: what a policy does to a load is the same on every machine.
"""

import csv
import heapq
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from scheduler.core import SchedulerCore
from scheduler.door import RefusedError
from scheduler.plan import BatchPlan, Capacity, FinishedSequence, StepResult
from scheduler.policy import Limits
from scheduler.sequence import FinishReason, Request, Sequence
from scheduler.token_ids import TokenIds

DATA = Path(__file__).parent / "data"
_EXECUTOR = "executor"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a load. Times in seconds; it ends by itself after `num_output_tokens`."""

    time: float
    prompt_token_ids: TokenIds
    num_output_tokens: int
    max_tokens: int
    tenant: str = ""
    priority: int = 0
    deadline: float | None = None


@dataclass(slots=True)
class Served:
    """What became of it; times in seconds, None when it never came to that."""

    arrival: Arrival
    first_token: float | None = None
    ended: float | None = None
    refused: bool = False
    in_time: bool = True


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step: roughly an 8B model on one large GPU by default."""

    base: float = 0.012
    per_token: float = 0.00006

    def __call__(self, num_tokens: int) -> float:
        """Of a step that computes so many tokens."""
        return self.base + self.per_token * num_tokens


class LogicalRun:
    """One load through one core."""

    def __init__(self, limits: Limits, capacity: Capacity, step_time: StepTime | None = None) -> None:
        self.core = SchedulerCore(limits, cache_secret=b"logical")
        self.core.attach(_EXECUTOR, 1, capacity, 0.0)
        self.state = self.core.executors[_EXECUTOR]
        self.now = 0.0
        self.served: list[Served] = []
        self._step_time = step_time or StepTime()
        self._of: dict[Sequence, Served] = {}

    def run(self, arrivals: Iterable[Arrival], each_step: Callable[[], None] | None = None) -> list[Served]:
        """Serves all of them to their ends; `each_step` is called after every step."""
        coming = [(arrival.time, index, arrival) for index, arrival in enumerate(arrivals)]
        heapq.heapify(coming)
        while coming or not self.core.is_idle:
            while coming and coming[0][0] <= self.now:
                self._submit(heapq.heappop(coming)[2])
            for seq in self.core.expire(self.now):
                self._end(seq, in_time=False)
            plan = self.core.schedule(_EXECUTOR, self.now)
            if plan is not None:
                self._step(plan)
                if each_step is not None:
                    each_step()
            elif not self.state.is_hashing:
                times = [item[0] for item in coming[:1]]
                times += [time for time in [self.core.next_timer] if time is not None]
                self.now = max(self.now, min(times))
        return self.served

    def _submit(self, arrival: Arrival) -> None:
        served = Served(arrival)
        self.served.append(served)
        number = len(self.served)
        request = Request(
            key=number.to_bytes(16),
            request_id=str(number),
            prompt_token_ids=arrival.prompt_token_ids,
            sampling=b"",
            max_tokens=arrival.max_tokens,
            tenant=arrival.tenant,
            priority=arrival.priority,
            deadline=arrival.deadline,
            arrival=arrival.time,
        )
        try:
            self._of[self.core.submit(request, now=self.now)] = served
        except RefusedError:
            served.refused, served.in_time = True, False

    def _step(self, plan: BatchPlan) -> None:
        seconds = self._step_time(sum(plan.num_tokens))
        self.now += seconds
        sampled = [7] * sum(plan.num_samples)
        result = StepResult(
            plan.epoch, plan.step_id, plan.seq_ids, plan.num_samples, sampled, total_us=round(seconds * 1e6)
        )
        for seq, seq_id, count in zip(plan.rows, plan.seq_ids, plan.num_samples, strict=True):
            served = self._of.get(seq)
            if not count or served is None:
                continue
            if served.first_token is None:
                served.first_token = self.now
            if seq.num_output_tokens + 1 >= min(served.arrival.num_output_tokens, served.arrival.max_tokens):
                result.finished.append(FinishedSequence(seq_id, FinishReason.STOP))
        for seq in self.core.update(_EXECUTOR, result, self.now).ended:
            self._end(seq, in_time=True)

    def _end(self, seq: Sequence, *, in_time: bool) -> None:
        served = self._of.pop(seq)
        served.ended = self.now
        deadline = served.arrival.deadline
        served.in_time = in_time and (deadline is None or self.now <= deadline)
        self.core.forget(seq)


def capacity(
    num_blocks: int, *, block_size: int = 16, max_num_seqs: int = 256, budget: int = 2048
) -> Capacity:
    """An executor of this size."""
    return Capacity(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_seq_len=1 << 20,
        max_window=1,
        vocab_size=1 << 31,
    )


def azure_conversation(count: int) -> list[tuple[float, int, int]]:
    """(arrival, prompt tokens, output tokens) of the first requests of the Azure conversation trace."""
    with (DATA / "azure2023_conv.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))[:count]
    return [(float(r["arrival_s"]), int(r["prompt_tokens"]), int(r["output_tokens"])) for r in rows]


def fresh_prompt(number: int, length: int) -> TokenIds:
    """A prompt that shares no block with any other."""
    return array("I", [number]) + array("I", range(length - 1))

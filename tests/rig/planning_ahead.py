"""A scheduler that plans ahead, without a network: what drives an executor's steps in tests. No pytest."""

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

from executor.device_thread import Later
from executor.late_work import LateEpochWork
from executor.plan import BatchPlan, NewSequence, SamplingParams, StepResult
from executor.runner import ModelRunner
from executor.sequences import SequenceTable
from executor.work import EpochWork

BLOCK_SIZE = 16


def table(runner: ModelRunner, max_num_batched_tokens: int = 64) -> SequenceTable:
    return SequenceTable(
        num_blocks=runner.num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        max_num_batched_tokens=max_num_batched_tokens,
        max_seq_len=runner.max_seq_len,
        vocab_size=runner.vocab_size,
        eos_token_ids=runner.eos_token_ids,
        matcher_of=runner.matcher_of,
    )


class Window2:
    """A scheduler of one executor that plans step k + 1 before it has the result of step k, as late as it
    may."""

    def __init__(self, work: EpochWork | LateEpochWork, *, window: int) -> None:
        self.work = work
        self.window = window
        self.step_id = 0
        self.acked = 0
        self.under_way: deque[tuple[BatchPlan, Any]] = deque()
        self.results: list[StepResult] = []
        self.known: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.max_known: dict[int, int] = {}
        self.ended: set[int] = set()

    def step(self, admitted: list[NewSequence], released: list[int], budget: int) -> None:
        self.step_id += 1
        for seq_id in released:
            for column in (self.known, self.computed, self.max_known):
                column.pop(seq_id, None)
        for new in admitted:
            self.known[new.seq_id], self.computed[new.seq_id] = len(new.token_ids), new.num_computed_tokens
            self.max_known[new.seq_id] = len(new.token_ids) + new.params.max_tokens
        seq_ids, num_tokens, positions_sum = [], [], 0
        for seq_id, known in self.known.items():
            first = self.computed[seq_id]
            if seq_id in self.ended or known >= self.max_known[seq_id]:
                continue
            seq_ids.append(seq_id)
            num_tokens.append(min(budget, known - first))
            positions_sum += first
            self.computed[seq_id] += num_tokens[-1]
            if self.computed[seq_id] == known:
                self.known[seq_id] += 1  # one more token, which nobody here has seen
        plan = BatchPlan(
            epoch=1, step_id=self.step_id, acked_step_id=self.acked, released_seq_ids=tuple(released),
            admitted=tuple(admitted), seq_ids=tuple(seq_ids), num_tokens=tuple(num_tokens),
            positions_sum=positions_sum,
        )  # fmt: skip
        self.under_way.append((plan, self.work.execute(plan)))
        while len(self.under_way) >= self.window:
            self.take()

    def take(self) -> None:
        plan, outcome = self.under_way.popleft()
        if isinstance(outcome, Later):
            outcome.wait()
            outcome = outcome.finish()
        result, _ = outcome
        self.results.append(result)
        self.acked = plan.step_id
        over = {each.seq_id for each in result.finished} | {each.seq_id for each in result.errors}
        self.ended |= over

    def drain(self) -> None:
        while self.under_way:
            self.take()


def run(
    work: EpochWork | LateEpochWork,
    sequences: Sequence[Any],
    window: int,
    budget: int,
    cancelled: int = 0,
    *,
    first_block: int = 0,
) -> list[StepResult]:
    """All results of `sequences`, each its options, its prompt and after how many steps it comes.

    Their blocks are those from `first_block` on. One that is `cancelled` is the first, in that step.
    """
    driver = Window2(work, window=window)
    free = itertools.count(first_block)
    for step in range(1, 34):
        admitted = []
        for seq_id, (options, prompt, at_step) in enumerate(sequences, start=1):
            if at_step + 1 == step:
                params = SamplingParams(**options)
                blocks = tuple(next(free) for _ in range(-(-(len(prompt) + 10) // BLOCK_SIZE)))
                wants = params.prompt_logprobs is not None and len(prompt) > 1
                admitted.append(
                    NewSequence(
                        seq_id, tuple(prompt), len(prompt), 0, blocks, params,
                        prompt_logprobs_from=1 if wants else None,
                    )
                )  # fmt: skip
        released = [1] if step == cancelled and 1 in driver.known else []
        driver.step(admitted, released, budget)
    driver.drain()
    return driver.results


def tokens_of(results: list[StepResult]) -> dict[int, list[int]]:
    output: dict[int, list[int]] = {}
    for result in results:
        ids = iter(result.token_ids)
        for seq_id, count in zip(result.seq_ids, result.num_sampled, strict=True):
            output.setdefault(seq_id, []).extend(next(ids) for _ in range(count))
    return output

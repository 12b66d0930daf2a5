"""Takes token ids and their log-probabilities out of a step's result. Pure.

A row counts for the admission it was planned for: a sequence that has since been aborted, preempted or moved
has another `seq_id`, and the row is dropped.
"""

from scheduler.counters import Counters
from scheduler.plan import BatchPlan, StepResult
from scheduler.sequence import Sequence


def take_prompt_logprobs(plan: BatchPlan, result: StepResult, progressed: list[Sequence]) -> list[Sequence]:
    """Keeps prompt log-probabilities, each position once; returns the sequences that lack what was due."""
    unfit: list[Sequence] = []
    for seq, seq_id, num_computed_tokens in plan.filled:
        known = seq.prompt_logprobs
        if known is None or seq.seq_id != seq_id or any(e.seq_id == seq_id for e in result.errors):
            continue
        num_due = min(num_computed_tokens, seq.num_prompt_tokens - 1) - len(known)
        if num_due <= 0:
            continue
        first_position, entries = result.prompt_logprobs.get(seq_id, (0, []))
        if first_position == len(known) + 1 and len(entries) == num_due:
            known.extend(entries)
            progressed.append(seq)
        else:
            unfit.append(seq)
    return unfit


def append_tokens(
    rows: list[Sequence], result: StepResult, progressed: list[Sequence], counters: Counters
) -> list[Sequence]:
    """Appends each row's ids; returns the sequences whose ids came without their log-probabilities."""
    unfit: list[Sequence] = []
    at = 0
    token_ids = result.token_ids
    for seq, seq_id, count in zip(rows, result.seq_ids, result.num_sampled, strict=True):
        if count == 0:
            continue
        if seq.seq_id != seq_id:  # that admission is over
            counters.wasted_tokens += count
        elif seq.logprobs is not None:
            entries = result.logprobs.get(seq_id, [])
            if len(entries) == count:
                seq.logprobs.extend(entries)
                seq.token_ids.extend(token_ids[at : at + count])
                seq.tenant.num_output_tokens += count
                progressed.append(seq)
            else:
                unfit.append(seq)
        elif count == 1:
            seq.token_ids.append(token_ids[at])
            seq.tenant.num_output_tokens += 1
            progressed.append(seq)
        else:
            seq.token_ids.extend(token_ids[at : at + count])
            seq.tenant.num_output_tokens += count
            progressed.append(seq)
        at += count
    return unfit

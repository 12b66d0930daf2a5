"""Speculative decoding: puts guesses into a plan as draft tokens, and sees from the result which were right.

`lookup` makes guesses and `drafting` says whether they pay; this module fits them into what a plan has left
of tokens, time, slots and blocks. Pure.
"""

from scheduler.core_state import CoreState
from scheduler.counters import Counters
from scheduler.drafting import MAX_ROWS
from scheduler.executor_state import ExecutorState
from scheduler.plan import BatchPlan
from scheduler.plan_builder import PlanBuilder
from scheduler.sequence import Sequence


def add_draft_tokens(core: CoreState, state: ExecutorState, builder: PlanBuilder, now: float) -> None:
    """Adds draft tokens to a plan that is complete otherwise: to rows that reach their last known token.

    Only while plans wait for all results: none may be made behind draft tokens. None while suspects are
    searched, and none for what was under way when an executor died: what executors die of must not depend on
    guesses, or it is never found.
    """
    if state.drafting is None or not state.drafting.waits or core.inquiry:
        return
    if not 0 < len(builder.rows) <= MAX_ROWS:
        return
    line, max_step_us = state.step_time.line, core.limits.max_step_us
    within = None if max_step_us is None else state.step_time.tokens_within(max_step_us)
    num_tokens = sum(builder.num_tokens)
    if within is not None:
        builder.budget = min(builder.budget, within - num_tokens)
    for row, seq in enumerate(builder.rows):
        num_known = len(seq.token_ids)
        if seq.num_computed_tokens != num_known or seq.is_prefilling or seq.is_padding:
            continue
        if seq.num_tokens_at_crash:
            continue
        guess = state.drafting.guess(seq, num_tokens, line)
        most = min(builder.budget, seq.max_len - 1 - num_known, len(guess))
        if most > seq.num_slots - num_known and _may_grow_early(state, seq, builder):
            seq.tenant.meter(1, now)
            builder.grow([seq], state.blocks)
        most = min(most, seq.num_slots - num_known)
        if most > 0:
            builder.add_draft_tokens(row, guess[:most])
            num_tokens += most
            core.counters.draft_tokens += most


def _may_grow_early(state: ExecutorState, seq: Sequence, builder: PlanBuilder) -> bool:
    """Whether `seq` may have a block for draft tokens: it will need one soon, and there is plenty."""
    if seq.seq_id in builder.grown_seq_ids or seq.num_slots >= seq.max_len - 1 or not seq.tenant.may_grow:
        return False
    return state.blocks.num_free >= 2 * len(state.running) + state.watermark_blocks


def settle(state: ExecutorState, plan: BatchPlan, counters: Counters) -> None:
    """The ids that answer `plan` are in the token logs: counts the right guesses among them."""
    for seq_id in plan.draft_tokens:
        seq = state.running.get(seq_id)
        if seq is not None and len(seq.token_ids) > seq.num_computed_tokens:  # else its row failed
            num_accepted = len(seq.token_ids) - seq.num_computed_tokens - 1
            counters.draft_tokens_accepted += num_accepted
            state.num_accepted_tokens += num_accepted
            seq.settle_draft()

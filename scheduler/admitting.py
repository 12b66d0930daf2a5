"""Distributes the tokens that decoding leaves of a step: to prompts in progress, and to waiting sequences.

`entrance` says which may enter, and `placement` whether another executor should take them; this module has
the order in which they are considered, and admits them. Pure.
"""

import math

from scheduler import entrance
from scheduler.batching import Batching
from scheduler.core_state import CoreState
from scheduler.executor_state import ExecutorState
from scheduler.explain import Reason
from scheduler.placement import Turn
from scheduler.plan_builder import PlanBuilder
from scheduler.recovery import recompute_budget
from scheduler.sequence import Event, Sequence
from scheduler.waiting import Policy

MAX_PUT_BEHIND = 250  # sequences found to be too late in one plan: a step must stay short


def give_out(
    core: CoreState,
    state: ExecutorState,
    unfinished: list[Sequence],
    builder: PlanBuilder,
    now: float,
    *,
    may_enter: bool,
) -> None:
    """Gives out the token budget: by importance, then in the policy's order, then in order of admission.

    A waiting sequence comes before the next chunk of a long prompt if it is more important, and after it
    otherwise. Prompts in progress age as waiting sequences do: a turn won by age lasts until the prompt is
    computed.
    """
    state.look_again_at = None
    state.num_queued_tokens = 0
    if not (unfinished or core.waiting):
        if may_enter:
            core.clocks.set(Reason.QUEUED_FOR_STEP, now)
        return
    if len(unfinished) > 1:
        _order(core, unfinished)
    budget = builder.budget
    state.num_queued_tokens = sum(seq.num_computable_tokens - seq.num_computed_tokens for seq in unfinished)
    alone = core.inquiry.only_these(state, now) if core.inquiry and may_enter else None
    newcomers = core.waiting if may_enter and alone is None else None
    core.recovery_pace.begin(state, unfinished, builder, newcomers, now)
    turn = Turn(core.placement, state) if len(core.executors) > 1 else None
    try:
        for seq in unfinished:
            if may_enter and alone is None:
                _admit(core, state, builder, turn, now, before=seq)
            if builder.budget <= 0:
                break
            _chunk(core, seq, builder)
        if builder.budget <= 0:
            _give_turns(core, unfinished, builder, now)
        if may_enter and alone is None:
            _admit(core, state, builder, turn, now)
    finally:
        state.made_way_for = None  # in this plan or not at all
        if turn is not None:
            _end_turn(core, state, turn)
    _admit_alone(core, state, builder, alone, now)
    state.num_queued_tokens -= budget - builder.budget


def _order(core: CoreState, unfinished: list[Sequence]) -> None:
    match core.limits.policy:
        case Policy.FCFS:
            unfinished.sort(key=lambda seq: seq.importance)
        case Policy.FAIR:
            unfinished.sort(key=lambda seq: (seq.importance, core.waiting.service(seq)))
        case Policy.DEADLINE:
            unfinished.sort(key=lambda seq: (seq.importance, seq.latest_start))


def _give_turns(core: CoreState, unfinished: list[Sequence], builder: PlanBuilder, now: float) -> None:
    """Prompts that better classes kept from tokens for too long come before them from the next step on."""
    served: dict[int, float] = {}  # the best importance in each class
    for seq, _, _ in builder.filled:
        served[seq.request.priority] = min(seq.importance, served.get(seq.request.priority, math.inf))
    for seq in unfinished:
        if seq.num_computed_tokens == seq.num_computable_tokens:
            continue
        priority = seq.request.priority
        best = min((importance for other, importance in served.items() if other < priority), default=math.inf)
        if seq.importance > best and (aged := core.waiting.aged_importance(seq, now)) < best:
            core.waiting.take_turn(seq, aged, now)


def _admit(
    core: CoreState,
    state: ExecutorState,
    builder: PlanBuilder,
    turn: Turn | None,
    now: float,
    before: Sequence | None = None,
) -> None:
    """Lets waiting sequences enter, in order, while seats, blocks and tokens last.

    With `before`, a prompt in progress, only those more important than it.

    The order is strict: a sequence that does not fit yet holds back those behind it, so that none is
    overtaken for ever. Two kinds are passed over, since they wait for something of their own: those whose
    tenant is at its own limit, and those that wait for a prefix that is being computed. With several
    executors (`turn`), so are those that another one would start sooner. A request-level batch is filled at
    once, whatever the token budget: it will not open again.
    """
    fills_at_once = core.batching is not Batching.ITERATION
    while turn is None or not turn.is_over:
        may_be_left = state.made_way_for is None
        seq = state.made_way_for or next_one(core, state, now, may_recompute=builder.recompute_budget > 0)
        if seq is not None and before is not None and not _passes(core, seq, before, now):
            return
        state.made_way_for = None
        reason = entrance.obstacle(state, seq, has_budget=builder.budget > 0 or fills_at_once)
        if reason is not None or seq is None:
            core.clocks.set(reason or Reason.QUEUED_FOR_STEP, now)
            return
        giver = turn if may_be_left else None
        if not _let_in(core, state, seq, builder, giver, now, follows=not fills_at_once, before=before):
            return


def next_one(
    core: CoreState, state: ExecutorState, now: float, *, may_recompute: bool = True
) -> Sequence | None:
    """The waiting sequence to be served next here.

    Those that seem too late to finish in time are put behind those that are not: least slack would serve them
    first, and make the others late as well. They are not dropped: the estimate may be wrong, and a seat may
    be free.
    """
    while True:
        seq = core.recovery_pace.next(state, core.waiting, now, may_recompute=may_recompute)
        if seq is None or not _is_late(seq, now) or core.slack.latest_start_at_best(seq) >= now:
            return seq
        put_behind(core, state, seq)
        if not _may_look_on(state):
            return None


def _is_late(seq: Sequence, now: float) -> bool:
    """Whether `seq` seems too late to finish in time, going by what was known when it began to wait."""
    return seq.latest_start < now and not seq.has_started


def is_too_late(core: CoreState, seq: Sequence, now: float) -> bool:
    """Whether it really is, now that its prefix was looked up and so what is cached of it is known."""
    return _is_late(seq, now) and core.slack.latest_start(seq) < now


def _may_look_on(state: ExecutorState) -> bool:
    """Whether the next sequence may be looked at in this plan, after one that was put behind."""
    state.is_still_looking |= state.num_put_behind >= MAX_PUT_BEHIND  # a prompt may be hashed as well
    return state.num_put_behind < MAX_PUT_BEHIND


def put_behind(core: CoreState, state: ExecutorState, seq: Sequence) -> None:
    """`seq` is too late: moves it behind those that are not."""
    state.num_put_behind += 1
    seq.latest_start = math.inf
    core.waiting.reorder(seq)
    core.hand_on(seq)


def tokens_left_to(core: CoreState, state: ExecutorState, head: Sequence, now: float) -> int:
    """Tokens of the next plan left to `head` after decoding and the prompts in progress that come before it.

    If no seat is free, `head` would take that of a decoding sequence, and its token.
    """
    num_decoding, num_before, num_recovering = 0, 0, 0
    for seq in state.running.values():
        count = seq.num_computable_tokens - seq.num_computed_tokens
        if count == 1:
            num_decoding += 1
        elif count > 1 and not _passes(core, head, seq, now):
            if seq.is_recovering and not head.is_recovering and seq.importance == head.request.priority:
                num_recovering += count
            else:
                num_before += count
    num_decoding -= len(state.running) >= state.max_num_seqs
    left = state.tokens_beside(num_decoding, core.limits.max_step_us)
    return left - num_before - min(num_recovering, recompute_budget(left))


def _passes(core: CoreState, seq: Sequence, under_way: Sequence, now: float) -> bool:
    """Whether `seq`, the next one, enters before the next chunk of the prompt `under_way`.

    Age counts only against better classes.
    """
    if seq.request.priority > under_way.request.priority:
        return core.waiting.importance(seq, now) < under_way.importance
    return seq.request.priority < under_way.importance


def _let_in(
    core: CoreState,
    state: ExecutorState,
    seq: Sequence,
    builder: PlanBuilder,
    turn: Turn | None,
    now: float,
    *,
    follows: bool,
    before: Sequence | None,
) -> bool:
    """Admits `seq`, or passes it over; False when those behind it must wait as well."""
    match core.find_place(state, seq, follows=follows):
        case entrance.Hashing():
            return False  # hashing continues in the next step
        case entrance.AtOwnLimit():
            pass  # its tenant's clock tells the time lines of all its sequences
        case entrance.Follows(leader):
            if seq.time_line is not None:
                detail = f"{leader.request.request_id} is computing its beginning"
                seq.time_line.wait(now, core.clocks, step_id=0, detail=detail, own=Reason.QUEUED_FOR_PREFIX)
        case entrance.Blocked():
            core.clocks.set(Reason.QUEUED_FOR_BLOCKS, now)
            return False
        case entrance.Fits(matched):
            if is_too_late(core, seq, now):
                put_behind(core, state, seq)
                return _may_look_on(state)
            num_cached_tokens = len(matched) * state.blocks.block_size
            if turn is not None and turn.give_away(seq, num_cached_tokens, now):
                core.waiting.park(seq)
            else:
                _place(core, state, seq, matched, builder, now, before)
    return True


def _admit_alone(
    core: CoreState, state: ExecutorState, builder: PlanBuilder, alone: list[Sequence] | None, now: float
) -> None:
    """Admits these and no others: executors have died, and one of these may be the reason."""
    if alone is None:
        return
    core.see_who_takes_newcomers()
    for seq in alone:
        if entrance.obstacle(state, seq, has_budget=builder.budget > 0) is not None:
            return
        found = core.find_place(state, seq, follows=False)
        if isinstance(found, entrance.Fits) and state.suits(seq):
            _place(core, state, seq, found.matched, builder, now)


def _place(
    core: CoreState,
    state: ExecutorState,
    seq: Sequence,
    matched: list[int],
    builder: PlanBuilder,
    now: float,
    before: Sequence | None = None,
) -> None:
    """Admits `seq` with blocks for its whole context; `matched` are the cached ones it begins with.

    `before`: the prompt in progress before whose next chunk it enters.
    """
    blocks = state.blocks
    passes = before is not None and before.request.priority < seq.request.priority
    core.waiting.admit(seq, now, at=state.executor_id, passes=passes)
    num_cached_tokens = len(matched) * blocks.block_size
    if not seq.has_started:
        seq.num_cached_tokens = min(num_cached_tokens, seq.num_prompt_tokens)
        if seq.prompt_logprobs is None:  # else the cache was not asked, which is no miss
            state.cache.num_query_tokens += seq.num_prompt_tokens
            state.cache.num_hit_tokens += seq.num_cached_tokens
        seq.tenant.num_input_tokens += seq.num_prompt_tokens - seq.num_cached_tokens
        core.meters.queue_seconds.observe(now - seq.request.arrival)
    blocks.share(matched)
    block_table = matched + blocks.allocate(blocks.blocks_for(len(seq.token_ids)) - len(matched))
    seq.move(Event.ADMIT)
    seq.has_started = True
    seq.num_tokens_at_admission = len(seq.token_ids)
    seq.num_computed_tokens = num_cached_tokens
    core.enter(state, seq, block_table, builder)
    core.unpark_followers(state.cache.begin(seq, len(matched)))
    core.drain_rate.observe(now)
    num_new = len(seq.token_ids) - num_cached_tokens
    state.num_queued_tokens += num_new
    core.recovery_pace.seated(seq)
    core.note(seq, Reason.PREFILL, state, f"{num_new} tokens, {num_cached_tokens} cached")
    if builder.budget > 0:
        _chunk(core, seq, builder)


def _chunk(core: CoreState, seq: Sequence, builder: PlanBuilder) -> None:
    """Plans as many uncomputed tokens of `seq` as the budget allows; fewer if it recovers beside others."""
    if not seq.is_recovering:
        builder.chunk(seq, builder.budget)
        return
    shares = builder.best_other <= seq.importance
    limit = min(builder.budget, builder.recompute_budget) if shares else builder.budget
    if core.inquiry:
        limit = min(limit, core.inquiry.num_harmless(seq) or limit)
    if limit > 0:
        before = builder.budget
        builder.chunk(seq, limit)
        builder.recompute_budget -= before - builder.budget


def _end_turn(core: CoreState, state: ExecutorState, turn: Turn) -> None:
    """Puts the sequences that were left to other executors back into their places in the queue."""
    for seq in turn.given_away:
        core.waiting.unpark(seq)
    if not state.running:
        state.look_again_at = turn.look_again_at

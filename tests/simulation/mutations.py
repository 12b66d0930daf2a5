"""Safety rules, each broken on purpose: a simulation that lets one of them pass is worth nothing.

Each mutation patches one rule of the real code, and names a seed in whose world the breach was found. That
world finds it again at each run of the tests; the soak form looks anew, among the first 600.
"""

import contextlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from executor import session as executor_sessions
from router import scheduler_session as router_sessions
from scheduler import (
    blocks,
    core,
    core_state,
    door,
    executor_session,
    lease,
    preemption,
    prefix_cache,
    router_session,
    stranded,
    suspects,
)
from scheduler import plan as plans
from scheduler.sequence import Event, Sequence, StatusCode

SEEDS = 600


@dataclass(frozen=True, slots=True)
class Mutation:
    """One rule and how it is broken."""

    name: str
    owner: Any
    attribute: str
    broken: Callable[[Any], Any]
    """Given what the rule was, what takes its place."""
    found_by: int
    """A seed whose world shows the breach."""

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The rule is broken inside."""
        before = self.owner.__dict__[self.attribute]
        rule = before.fget if isinstance(before, property) else before
        broken = self.broken(rule)
        if isinstance(before, property):
            broken = property(broken)
        with mock.patch.object(self.owner, self.attribute, broken):
            yield


# --- towards executors -----------------------------------------------------------------------------------


def _resends_nothing(_: Any) -> Any:
    return lambda session: []


def _resends_the_newest_alone(_: Any) -> Any:
    return lambda session: list(session.unanswered)[-1:]


def _applies_results_twice(received: Any) -> Any:
    def broken(self: executor_session.ExecutorSession, result: plans.StepResult) -> Any:
        if result.step_id == self.acked_step_id and self.unanswered:
            return self.unanswered[0], self.unanswered[0].rows
        return received(self, result)

    return broken


def _acknowledges_nothing(plan: Any) -> Any:
    def broken(self: core.SchedulerCore, state: Any, draft: Any) -> Any:
        made = plan(self, state, draft)
        return made if made is None else _changed_in_window(state, made, acked_step_id=0)

    return broken


def _forgets_releases(plan: Any) -> Any:
    def broken(self: core.SchedulerCore, state: Any, draft: Any) -> Any:
        state.released_seq_ids = state.released_seq_ids[1:]
        return plan(self, state, draft)

    return broken


def _forgets_ghosts(plan: Any) -> Any:
    def broken(self: core.SchedulerCore, state: Any, draft: Any) -> Any:
        state.has_ghosts = False
        return plan(self, state, draft)

    return broken


def _changed_in_window(state: Any, plan: plans.BatchPlan, **fields: Any) -> plans.BatchPlan:
    changed = replace(plan, **fields)
    state.session.unanswered[-1] = changed
    return changed


def _reuses_seq_ids(enter: Any) -> Any:
    def broken(self: core_state.CoreState, state: Any, seq: Sequence, *rest: Any) -> None:
        if seq.num_preemptions:
            state.next_seq_id -= 1
        enter(self, state, seq, *rest)

    return broken


def _releases_nobody(leave: Any) -> Any:
    def broken(self: core_state.CoreState, *args: Any, tell_executor: bool, **more: Any) -> None:
        leave(self, *args, tell_executor=False, **more)

    return broken


def _takes_any_stop(_: Any) -> Any:
    return lambda plan, result, stopped, eos_token_ids: None


# --- who executors die of --------------------------------------------------------------------------------


def _finds_nobody_guilty(crashed: Any) -> Any:
    def broken(self: suspects.Suspects[Any], rows: Any, **more: Any) -> None:
        crashed(self, rows, **more)

    return broken


def _suspects_nobody_of_wrong_answers(received: Any) -> Any:
    def broken(self: executor_session.ExecutorSession, result: plans.StepResult) -> Any:
        try:
            return received(self, result)
        except executor_session.SessionBrokenError:
            self.unanswered.clear()
            raise

    return broken


def _excuses_nobody(_: Any) -> Any:
    return lambda self, item: False


def _ends_all_choices_as_if_executors_knew(end: Any) -> Any:
    def broken(self: core_state.CoreState, seq: Sequence, finish: Any, event: Any) -> None:
        is_guilty = finish.status_code is StatusCode.INTERNAL and event is Event.ABORT
        end(self, seq, finish, Event.FAIL if is_guilty else event)

    return broken


# --- at the executor -------------------------------------------------------------------------------------


def _takes_any_epoch(receive: Any) -> Any:
    def broken(self: executor_sessions.Session[Any], stream: int, plan: Any) -> Any:
        epoch = self._epoch
        if epoch is not None and plan.epoch != epoch.number:
            epoch.streams.add(stream)
            plan = replace(plan, epoch=epoch.number)
        return receive(self, stream, plan)

    return broken


def _grants_lower_terms(grant: Any) -> Any:
    def broken(self: executor_sessions.Session[Any], scheduler_id: str, term: int, epoch: int) -> int:
        self._term = min(self._term, term - 1) if term else self._term
        return int(grant(self, scheduler_id, term, epoch))

    return broken


def _runs_resent_plans_again(receive: Any) -> Any:
    def broken(self: executor_sessions.Session[Any], stream: int, plan: Any) -> Any:
        action = receive(self, stream, plan)
        return executor_sessions.Run(plan) if isinstance(action, executor_sessions.Answer) else action

    return broken


def _forgets_results_at_once(complete: Any) -> Any:
    def broken(self: executor_sessions.Session[Any], epoch: int, step_id: int, result: Any) -> Any:
        streams = complete(self, epoch, step_id, result)
        if not streams and self._epoch is not None and self._epoch.number == epoch:
            del self._epoch.steps[step_id]
        return streams

    return broken


# --- blocks and recompute --------------------------------------------------------------------------------


def _keeps_a_block(release: Any) -> Any:
    return lambda self, block_ids: release(self, block_ids[1:])


def _frees_early(decode_rows: Any) -> Any:
    """The first block of whoever has grown to a third one is given to others, as if it were not read."""

    def broken(self: core.SchedulerCore, state: Any, draft: Any) -> Any:
        unfinished = decode_rows(self, state, draft)
        for seq in state.running.values():
            if len(seq.block_table) == 3:
                state.blocks.release(seq.block_table[:1])
                break
        return unfinished

    return broken


def _recomputes_the_prompt_alone(_: Any) -> Any:
    def broken(self: Sequence) -> None:
        self.token_ids = array("I", self.token_ids[: self.num_prompt_tokens])
        self.num_computed_tokens = 0
        self.num_computable_tokens = min(len(self.token_ids), self.max_len - 1)

    return broken


def _preempts_with_results_out(preempt_for_growth: Any) -> Any:
    def broken(core: core_state.CoreState, state: Any) -> Any:
        with mock.patch.object(executor_session.ExecutorSession, "num_unanswered", 0):
            return preempt_for_growth(core, state)

    return broken


def _registers_half_filled_blocks(register: Any) -> Any:
    def broken(self: Any, seq: Sequence, num_computed_tokens: int) -> Any:
        return register(self, seq, min(num_computed_tokens + 2, len(seq.token_ids), seq.num_slots))

    return broken


def _counts_guesses_as_computed(settle_draft: Any) -> Any:
    def broken(self: Sequence) -> None:
        settle_draft(self)
        self.num_computed_tokens = min(self.num_computed_tokens + 1, self.num_computable_tokens)

    return broken


# --- towards routers -------------------------------------------------------------------------------------


def _starts_a_token_early(attach: Any) -> Any:
    return lambda self, handle, seq, num_received: attach(self, handle, seq, max(0, num_received - 1))


def _starts_a_token_late(attach: Any) -> Any:
    def broken(self: Any, handle: int, seq: Sequence, num_received: int) -> Any:
        return attach(self, handle, seq, min(num_received + 1, seq.num_output_tokens))

    return broken


def _no_stream_is_newer(_: Any) -> Any:
    return lambda self, other: False


def _any_ids_continue(_: Any) -> Any:
    return lambda seq, output_token_ids: True


def _refuses_the_accepted_for_load(check: Any) -> Any:
    def broken(at: Any, request: Any, tenant: Any, now: float) -> None:
        check(at, replace(request, accepted_before=False), tenant, now)

    return broken


# --- at the router ---------------------------------------------------------------------------------------


def _resubmits_without_ids(next_submit: Any) -> Any:
    def broken(self: Any, live: Any, now: float) -> Any:
        made = next_submit(self, live, now)
        return made if made.body is None else replace(made, body=replace(made.body, output_token_ids=()))

    return broken


def _takes_duplicates(take_output: Any) -> Any:
    def broken(self: Any, output: Any, now: float) -> Any:
        if output.message_id <= self._last_message_id:
            self._last_message_id = output.message_id - 1
        return take_output(self, output, now)

    return broken


def _takes_messages_of_a_stream_it_left(receive: Any) -> Any:
    return lambda self, connection, message, now: receive(self, self._connection, message, now)


def _acknowledges_no_message(next_message: Any) -> Any:
    def broken(self: Any, now: float) -> Any:
        self._ack_due = False
        return next_message(self, now)

    return broken


# --- who leads -------------------------------------------------------------------------------------------


def _leads_at_the_same_term(look: Any) -> Any:
    def broken(self: lease.Lease, record: Any, now: float, *, is_free: bool) -> Any:
        claim = look(self, record, now, is_free=is_free)
        if claim is None or record is None:
            return claim
        return replace(claim, record=replace(claim.record, term=record.term))

    return broken


def _never_steps_down(_: Any) -> Any:
    return lambda self, now: None


# --- executors that differ -------------------------------------------------------------------------------


def _parks_nobody(_: Any) -> Any:
    return lambda self, seq, now: None


def _gives_up_at_once(_: Any) -> Any:
    return lambda self, now: [(seq, "nobody can hold it") for seq in self._since]


def _counts_the_accepted_as_new(check_fits: Any) -> Any:
    return lambda core, request: check_fits(core, replace(request, accepted_before=False))


MUTATIONS = (
    Mutation("who fits nowhere stands in the way", stranded.Stranded, "began_to_wait", _parks_nobody, 170),
    Mutation("who fits nowhere is given up at once", stranded.Stranded, "overdue", _gives_up_at_once, 170),
    Mutation(
        "the accepted are refused for their length", door, "_check_fits", _counts_the_accepted_as_new, 42
    ),
    Mutation("a plan is not sent again", executor_session.ExecutorSession, "resend", _resends_nothing, 93),
    Mutation(
        "the older of two plans is not sent again",
        executor_session.ExecutorSession,
        "resend",
        _resends_the_newest_alone,
        0,
    ),
    Mutation(
        "a result is applied twice", executor_session.ExecutorSession, "received", _applies_results_twice, 7
    ),
    Mutation("a result is not acknowledged", core.SchedulerCore, "_plan", _acknowledges_nothing, 0),
    Mutation("a release is forgotten", core.SchedulerCore, "_plan", _forgets_releases, 2),
    Mutation("ghosts are forgotten", core.SchedulerCore, "_plan", _forgets_ghosts, 0),
    Mutation("a seq_id is used twice", core_state.CoreState, "enter", _reuses_seq_ids, 105),
    Mutation("who is given up is not released", core_state.CoreState, "_leave", _releases_nobody, 2),
    Mutation(
        "an answer that does not fit casts suspicion on nobody",
        executor_session.ExecutorSession,
        "received",
        _suspects_nobody_of_wrong_answers,
        108,
    ),
    Mutation("a stop at any id is taken", executor_session, "_check_stops", _takes_any_stop, 108),
    Mutation("nobody is found guilty", suspects.Suspects, "crashed", _finds_nobody_guilty, 16),
    Mutation("nobody is excused", suspects.Suspects, "_is_excused", _excuses_nobody, 20),
    Mutation(
        "a guilty request's choices elsewhere go on",
        core_state.CoreState,
        "_end",
        _ends_all_choices_as_if_executors_knew,
        262,
    ),
    Mutation("a plan of any epoch is run", executor_sessions.Session, "receive", _takes_any_epoch, 20),
    Mutation("a lower term is accepted", executor_sessions.Session, "open", _grants_lower_terms, 511),
    Mutation(
        "a plan sent again runs again", executor_sessions.Session, "receive", _runs_resent_plans_again, 0
    ),
    Mutation(
        "a result is not kept for the next stream",
        executor_sessions.Session,
        "complete",
        _forgets_results_at_once,
        0,
    ),
    Mutation("a block is not given back", blocks.BlockManager, "release", _keeps_a_block, 0),
    Mutation("a block is freed early", core.SchedulerCore, "_decode_rows", _frees_early, 1),
    Mutation("the output is not recomputed", Sequence, "forget_computed", _recomputes_the_prompt_alone, 1),
    Mutation(
        "somebody is preempted with a result out",
        preemption,
        "preempt_for_growth",
        _preempts_with_results_out,
        91,
    ),
    Mutation(
        "a block is registered before it is full",
        prefix_cache.PrefixCache,
        "register",
        _registers_half_filled_blocks,
        80,
    ),
    Mutation("a wrong guess counts as computed", Sequence, "settle_draft", _counts_guesses_as_computed, 8),
    Mutation(
        "a cursor starts a token early", router_session.RouterSession, "attach", _starts_a_token_early, 2
    ),
    Mutation("a cursor starts a token late", router_session.RouterSession, "attach", _starts_a_token_late, 9),
    Mutation(
        "an older stream of a router is listened to",
        router_session.RouterSession,
        "is_newer_than",
        _no_stream_is_newer,
        76,
    ),
    Mutation("a reader goes on with whatever runs", core, "_continues", _any_ids_continue, 2),
    Mutation("the accepted are refused for load", door, "check", _refuses_the_accepted_for_load, 12),
    Mutation(
        "a request is resubmitted without its ids",
        router_sessions.SchedulerSession,
        "_next_submit",
        _resubmits_without_ids,
        2,
    ),
    Mutation(
        "a duplicate is delivered", router_sessions.SchedulerSession, "_take_output", _takes_duplicates, 7
    ),
    Mutation(
        "messages of a stream that was left are taken",
        router_sessions.SchedulerSession,
        "receive",
        _takes_messages_of_a_stream_it_left,
        46,
    ),
    Mutation(
        "a message is not acknowledged",
        router_sessions.SchedulerSession,
        "next_message",
        _acknowledges_no_message,
        2,
    ),
    Mutation("a term is led at twice", lease.Lease, "look", _leads_at_the_same_term, 2),
    Mutation("a leader never steps down", lease.Lease, "_step_down", _never_steps_down, 25),
)

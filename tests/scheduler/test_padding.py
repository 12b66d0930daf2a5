import pytest

from scheduler import padding
from scheduler.batching import Batching
from scheduler.policy import Admission, Limits
from scheduler.sequence import Finish, FinishReason, Sequence, State
from tests.scheduler.harness import EXECUTOR, Harness
from tests.scheduler.sequences import running

ENDS_BY_ITSELF = Finish(FinishReason.LENGTH)


def batch(batching: Batching = Batching.REQUEST_PADDED, *names: str) -> tuple[Harness, list[Sequence]]:
    """Members that run."""
    h = Harness(None, batching)
    seqs = [h.submit(name, [1, 2, 3], 20, ignore_eos=True) for name in names or "AB"]
    h.step()
    return h, seqs


@pytest.mark.parametrize(
    ("reason", "keeps"),
    [
        (FinishReason.STOP, True),
        (FinishReason.LENGTH, True),
        (FinishReason.ABORT, False),
        (FinishReason.DEADLINE, False),
        (FinishReason.ERROR, False),
    ],
)
def test_a_member_that_ends_by_itself_is_computed_on(reason: FinishReason, keeps: bool) -> None:
    h, (a, _) = batch()
    assert padding.keeps_seat(h.core.executors[EXECUTOR], a, Finish(reason)) is keeps


@pytest.mark.parametrize("batching", [Batching.ITERATION, Batching.REQUEST])
def test_no_other_kind_of_batch_computes_on(batching: Batching) -> None:
    h, (a, _) = batch(batching)
    assert not padding.keeps_seat(h.core.executors[EXECUTOR], a, ENDS_BY_ITSELF)


def test_the_last_member_leaves_no_padding() -> None:
    h, (a, b) = batch()
    state = h.core.executors[EXECUTOR]
    b.is_padding = True
    assert not padding.keeps_seat(state, a, ENDS_BY_ITSELF)


def test_a_context_that_cannot_grow_leaves_no_padding() -> None:
    h, (a, _) = batch()
    state = h.core.executors[EXECUTOR]
    a.token_ids.extend([0] * (state.max_total_tokens - len(a.token_ids)))
    assert not padding.keeps_seat(state, a, ENDS_BY_ITSELF)


def test_padding_goes_on_from_the_same_context_in_the_same_blocks_and_shares_nothing_else() -> None:
    h, (a, _) = batch()
    state = h.core.executors[EXECUTOR]
    pad = padding.padding_of(state, a, a.block_table)
    assert pad.is_padding
    assert pad.state is State.RUNNING
    assert pad.block_table == a.block_table
    assert list(pad.token_ids) == list(a.token_ids)
    assert pad.token_ids is not a.token_ids
    assert (pad.num_computable_tokens - pad.num_computed_tokens) == 1
    assert pad.max_len == state.max_total_tokens


def test_a_batch_is_all_padding_when_nobody_is_left_to_compute_for() -> None:
    h, (a, b) = batch()
    state = h.core.executors[EXECUTOR]
    assert not padding.is_all_padding(state)
    a.is_padding = True
    assert not padding.is_all_padding(state)
    b.is_padding = True
    assert padding.is_all_padding(state)


def test_padding_is_charged_to_nobody_and_delivers_nothing() -> None:
    h, (a, b) = batch(Batching.REQUEST_PADDED, "A", "B")
    request = a.request
    h.core.cancel(b.request.key, FinishReason.ABORT, h.now)
    del h.sequences["B"]
    long = h.submit("long", [4, 5], 60, ignore_eos=True)
    h.run_to_end()
    h.check_outputs()
    tenant = a.tenant
    assert tenant.num_output_tokens == request.max_tokens + long.request.max_tokens + b.num_output_tokens
    assert tenant.num_running == 0
    assert tenant.num_blocks == 0


def test_a_sequence_without_padding_is_not_padding() -> None:
    assert not running("a").is_padding


def test_padding_does_not_outlive_the_last_member_when_that_one_is_preempted() -> None:
    h = Harness(
        Limits(window=1, watermark=0.0, admission=Admission.OPTIMISTIC),
        Batching.REQUEST_PADDED,
        num_blocks=6,
        block_size=4,
        max_num_seqs=2,
    )
    h.submit("short", [(7 * i) % 90 for i in range(11)], 2, ignore_eos=True)
    h.submit("long", [(7 * i + 1) % 90 for i in range(11)], 13, ignore_eos=True)
    h.run_to_end(max_steps=200)
    h.check_outputs()


def test_a_batch_whose_last_real_member_is_preempted_ends_and_opens_again() -> None:
    """Else its padding would be computed for ever, and nobody could enter."""
    limits = Limits(window=1, watermark=0.0, admission=Admission.OPTIMISTIC)
    h = Harness(limits, Batching.REQUEST_PADDED, num_blocks=3, block_size=4)
    h.submit("short", [1, 2], 4, ignore_eos=True)
    long = h.submit("long", [3], 8, ignore_eos=True)
    h.run_to_end(max_steps=100)
    h.check_outputs()
    assert long.num_preemptions == 1


def test_a_prompt_that_was_stopped_half_way_leaves_no_padding() -> None:
    """Its KV is not there: a router stops a sequence by its text, and that may be while it is recomputed."""
    h = Harness(None, Batching.REQUEST_PADDED, max_num_batched_tokens=1)
    a = h.submit("A", [1, 2, 3], 20, ignore_eos=True)
    h.submit("B", [4, 5], 20, ignore_eos=True)
    h.plan()
    assert not padding.keeps_seat(h.core.executors[EXECUTOR], a, Finish(FinishReason.STOP))
    h.core.cancel(a.request.key, FinishReason.STOP, h.now)
    h.run_to_end()

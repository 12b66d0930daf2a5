"""What is asked at a rehearsal, and which ends of it are right."""

import pytest

from scheduler import rehearsal
from scheduler.plan import FinishedSequence
from scheduler.sequence import FinishReason, Sequence, State
from tests.rig.checking_executor import capacity
from tests.scheduler.harness import EXECUTOR, Harness


def rehearse(**capacities: int) -> tuple[Harness, Sequence]:
    h = Harness(**capacities)  # type: ignore[arg-type]
    count = rehearsal.num_tokens(h.core.max_total_tokens)
    request = rehearsal.request(h.capacity, count, b"sampling")
    h.requests[request.sampling] = request
    return h, h.core.submit(request, now=0.0)


@pytest.mark.parametrize(
    "capacities", [{}, {"max_seq_len": 2}, {"num_blocks": 1, "max_num_batched_tokens": 1}]
)
def test_an_executor_of_any_size_that_answers_rightly_passes(capacities: dict[str, int]) -> None:
    h, seq = rehearse(**capacities)
    h.run_to_end()
    assert seq.state is State.FINISHED
    assert rehearsal.fault_of(seq) is None


@pytest.mark.parametrize(("max_total_tokens", "count"), [(1, 1), (2, 1), (5, 2), (8, 4), (4096, 4)])
def test_it_asks_for_no_more_than_there_is_room_for(max_total_tokens: int, count: int) -> None:
    assert rehearsal.num_tokens(max_total_tokens) == count


def test_its_ids_are_of_the_vocabulary_however_small_that_is() -> None:
    assert list(rehearsal.request(capacity(), 4, b"").prompt_token_ids) == [96, 95, 94, 93]
    assert list(rehearsal.request(capacity(vocab_size=2), 4, b"").prompt_token_ids) == [1, 0, 0, 0]


def test_a_row_in_error_is_not_right() -> None:
    h, seq = rehearse()
    h.plan()
    h.result(fail=0)
    assert "ERROR after 0 of 4 tokens: " in str(rehearsal.fault_of(seq))


def test_nor_is_an_end_before_all_tokens_are_there() -> None:
    h, seq = rehearse()
    h.plan()
    result = h.executor.run()
    result.finished.append(FinishedSequence(seq.seq_id, FinishReason.STOP))
    h.core.update(EXECUTOR, result, 0.0)
    assert rehearsal.fault_of(seq) == "STOP after 1 of 4 tokens"

import itertools
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.sequence import (
    TRANSITIONS,
    Event,
    FinishReason,
    IllegalTransitionError,
    Sequence,
    State,
    StatusCode,
    end_of_output,
)
from scheduler.tenants import Tenant, TenantLimits
from tests.scheduler.sequences import request, waiting

EOS = frozenset({2, 3})


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_a_move_that_the_table_lacks_raises_and_changes_nothing(state: State, event: Event) -> None:
    seq = waiting()
    seq.state = state
    if (state, event) in TRANSITIONS:
        seq.move(event)
        assert seq.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransitionError, match=f"is {state.value}, cannot {event.value}"):
            seq.move(event)
        assert seq.state is state


def test_nothing_leaves_the_end() -> None:
    assert not [event for state, event in TRANSITIONS if state is State.FINISHED]
    assert State.RUNNING not in {
        target for (_, event), target in TRANSITIONS.items() if event is not Event.ADMIT
    }


def test_a_resubmitted_sequence_knows_prompt_and_output_and_keeps_the_prompts_length() -> None:
    seq = waiting(prompt_len=4, max_tokens=8, output=3)
    assert list(seq.token_ids) == [1, 2, 3, 4, 50, 51, 52]
    assert (seq.num_prompt_tokens, seq.num_output_tokens, seq.num_resumed_tokens) == (4, 3, 3)
    assert (seq.max_len, seq.num_computable_tokens, seq.num_computed_tokens) == (12, 7, 0)
    assert list(seq.output_token_ids()) == [50, 51, 52]
    assert list(seq.output_token_ids(2)) == [52]


def test_the_last_token_of_all_is_known_and_never_fed() -> None:
    seq = waiting(prompt_len=4, max_tokens=3, output=3)
    assert seq.num_computable_tokens == seq.max_len - 1


def test_a_sequence_does_not_share_the_ids_of_its_request() -> None:
    asked = request()
    seq = Sequence.of(asked, Tenant("", TenantLimits()), array("I"), 1)
    seq.token_ids.append(9)
    assert list(asked.prompt_token_ids) == [1, 2, 3, 4]


@pytest.mark.parametrize(("want", "expected"), [(True, []), (False, None)])
def test_logprobs_are_kept_only_for_those_who_asked(want: bool, expected: list[object] | None) -> None:
    assert waiting(want_logprobs=want).logprobs == expected


def test_progress_is_counted_from_the_last_admission() -> None:
    seq = waiting(output=2)
    seq.num_tokens_at_admission = len(seq.token_ids)
    assert not seq.has_progressed
    seq.token_ids.append(1)
    assert seq.has_progressed


@pytest.mark.parametrize(
    ("fields", "ids", "reason", "matched"),
    [
        ({}, [], None, None),
        ({}, [9, 9], None, None),
        ({}, [9, 2], FinishReason.STOP, 2),
        ({}, [2, 9], None, None),  # only the last id ends a request
        ({"ignore_eos": True}, [9, 2], None, None),
        ({"ignore_eos": True, "stop_token_ids": frozenset({2})}, [9, 2], FinishReason.STOP, 2),
        ({"stop_token_ids": frozenset({7})}, [7], FinishReason.STOP, 7),
        ({"max_tokens": 2}, [9, 9], FinishReason.LENGTH, None),
        ({"max_tokens": 2}, [9, 2], FinishReason.STOP, 2),  # as the executor says it: STOP before LENGTH
        ({"max_tokens": 2}, [9, 9, 9], FinishReason.LENGTH, None),
    ],
)
def test_ids_that_end_a_request(
    fields: dict[str, object], ids: list[int], reason: FinishReason | None, matched: int | None
) -> None:
    finish = end_of_output(request(**fields), array("I", ids), EOS)  # type: ignore[arg-type]
    assert (finish and finish.reason) == reason
    assert finish is None or finish.matched_token_id == matched


@given(ids=st.lists(st.integers(0, 5), max_size=8), max_tokens=st.integers(1, 8))
def test_no_request_goes_on_past_its_max_tokens(ids: list[int], max_tokens: int) -> None:
    finish = end_of_output(request(max_tokens=max_tokens), array("I", ids), EOS)
    assert finish is not None or len(ids) < max_tokens


def test_status_codes_are_those_of_grpc() -> None:
    import grpc

    by_number = {code.value[0]: code.name for code in grpc.StatusCode}
    assert {code.value: code.name for code in StatusCode}.items() <= by_number.items()

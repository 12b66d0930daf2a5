import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.results import FinishReason, Piece
from chairlift.transcript import Diverged, Transcript
from protos.v1 import common_pb2, router_pb2

LENGTH = common_pb2.FINISH_REASON_LENGTH


def accepted(seed: int = 5, request_id: str = "r") -> router_pb2.GenerateEvent:
    return router_pb2.GenerateEvent(accepted=router_pb2.Accepted(request_id=request_id, seed=seed))


def delta(text: str, *token_ids: int, index: int = 0) -> router_pb2.GenerateEvent:
    return router_pb2.GenerateEvent(
        delta=router_pb2.Delta(
            index=index,
            text=text,
            token_ids=token_ids,
            logprobs=[
                common_pb2.TokenLogprobs(token_id=token_id, logprob=-1, rank=1) for token_id in token_ids
            ],
        )
    )


def finished(index: int = 0) -> router_pb2.GenerateEvent:
    usage = router_pb2.Usage(num_prompt_tokens=2, num_output_tokens=3)
    return router_pb2.GenerateEvent(
        finished=router_pb2.Finished(index=index, reason=LENGTH, usage=usage, stop="END")
    )


def started(n: int = 1) -> Transcript:
    transcript = Transcript(router_pb2.GenerateRequest(text="Hi", n=n, request_id="mine"))
    assert transcript.take(accepted()) is None
    return transcript


def test_a_stream_without_a_break_is_handed_on_and_summed_up() -> None:
    transcript = started()
    piece = transcript.take(delta("ab", 1, 2))
    assert piece is not None
    assert (piece.text, piece.token_ids, [entry.token_id for entry in piece.logprobs]) == (
        "ab",
        (1, 2),
        [1, 2],
    )
    assert transcript.take(delta("", 3)) is not None
    assert transcript.take(finished()) == Piece(0, "", (), (), FinishReason.LENGTH)
    answer = transcript.answer()
    assert (answer.request_id, answer.seed, answer.text) == ("r", 5, "ab")
    (choice,) = answer.choices
    assert (choice.token_ids, choice.matched, choice.usage.num_output_tokens) == ((1, 2, 3), "END", 3)


def test_b106_after_a_break_the_same_is_asked_with_the_seed_that_was_told() -> None:
    transcript = started()
    transcript.take(delta("ab", 1))
    transcript.restart()
    assert transcript.request == router_pb2.GenerateRequest(
        text="Hi", n=1, sampling=common_pb2.SamplingParams(seed=5)
    )


def test_a_request_that_was_never_accepted_is_asked_as_it_was() -> None:
    transcript = Transcript(router_pb2.GenerateRequest(text="Hi", request_id="mine"))
    transcript.restart()
    assert transcript.request == router_pb2.GenerateRequest(text="Hi", request_id="mine")


@pytest.mark.parametrize("again", [delta("ax", 1, 2), delta("ab", 1, 3), delta("x", 9), finished()])
def test_an_answer_that_differs_is_not_spliced(again: router_pb2.GenerateEvent) -> None:
    transcript = started()
    transcript.take(delta("ab", 1, 2))
    transcript.restart()
    with pytest.raises(Diverged):
        transcript.take(again)


def test_b106_a_resume_sends_every_id_and_goes_on_after_them() -> None:
    transcript = Transcript(router_pb2.GenerateRequest(text="Hi", n=2))
    first = accepted()
    first.accepted.resume_token = "t"
    for event in (first, delta("ab", 1, 2), delta("x", 9, index=1), finished(1)):
        transcript.take(event)
    transcript.restart()
    expected = router_pb2.GenerateRequest(text="Hi", n=2, request_id="r")
    expected.resume.resume_token = "t"
    expected.resume.received.add(index=0, token_ids=[1, 2])
    expected.resume.received.add(index=1, token_ids=[9])
    assert transcript.request == expected
    assert transcript.take(delta("c", 3)) is not None
    assert transcript.take(finished(1)) is None, "its end was shown"
    assert transcript.take(finished()) is not None
    choice = transcript.answer().choices[0]
    assert (choice.text, choice.token_ids, len(choice.logprobs)) == ("abc", (1, 2, 3), 3)
    transcript.forget_token()
    transcript.restart()
    assert transcript.request.sampling.seed == 5
    assert not transcript.request.HasField("resume")


CUTS = st.lists(st.integers(1, 4), max_size=12)


def deltas_of(token_ids: list[int], cuts: list[int], index: int) -> list[router_pb2.GenerateEvent]:
    """One choice's stream, each id said as a letter, cut into deltas."""
    events, start = [], 0
    for cut in [*cuts, len(token_ids)]:
        part = token_ids[start : start + cut]
        if part:
            events.append(delta("".join(chr(97 + t) for t in part), *part, index=index))
        start += cut
    return [*events, finished(index)]


@given(
    token_ids=st.lists(st.lists(st.integers(0, 25), max_size=12), min_size=1, max_size=3),
    cuts=st.lists(CUTS, min_size=1, max_size=4),
    breaks=st.lists(st.integers(0, 30), max_size=4),
)
def test_b106_however_streams_break_and_are_cut_each_token_is_shown_once(
    token_ids: list[list[int]], cuts: list[list[int]], breaks: list[int]
) -> None:
    transcript = started(len(token_ids))
    shown: list[Piece] = []
    for attempt, until in enumerate([*breaks, None]):
        events = [
            event
            for index, ids in enumerate(token_ids)
            for event in deltas_of(ids, cuts[(attempt + index) % len(cuts)], index)
        ]
        taken = [transcript.take(event) for event in [accepted(), *events][:until]]
        shown += [piece for piece in taken if piece is not None]
        if until is not None:
            transcript.restart()
    assert transcript.complete
    for index, ids in enumerate(token_ids):
        of_choice = [piece for piece in shown if piece.index == index]
        assert [token_id for piece in of_choice for token_id in piece.token_ids] == ids
        assert "".join(piece.text for piece in of_choice) == "".join(chr(97 + t) for t in ids)
        assert [piece.finish_reason for piece in of_choice if piece.finish_reason] == [FinishReason.LENGTH]
        assert transcript.answer().choices[index].token_ids == tuple(ids)
        assert len(transcript.answer().choices[index].logprobs) == len(ids)

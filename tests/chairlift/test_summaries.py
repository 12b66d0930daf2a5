from chairlift.summaries import frame_of
from protos.v1 import router_pb2


def test_a_row_of_guesses_decodes_and_one_of_a_prompt_does_not() -> None:
    members = [
        router_pb2.StepMember(request_id="guessed", seq_id=1, num_tokens=6, num_draft_tokens=5),
        router_pb2.StepMember(request_id="decoding", seq_id=2, num_tokens=1),
        router_pb2.StepMember(request_id="last chunk", seq_id=3, num_tokens=6),
        router_pb2.StepMember(request_id="chunk", seq_id=4, num_tokens=1, prefill=True),
    ]
    frame = frame_of(router_pb2.StepSummary(step_id=7, members=members, num_accepted_tokens=40))
    assert frame.chunks == {3, 4}
    assert frame.num_sampled == 3
    assert frame.gauges.num_accepted_tokens == 40

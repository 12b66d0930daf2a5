"""What the router's Watch tells of a step, as what is drawn of it: a step for seats, a frame for the lift."""

from chairlift.lift import End, Frame, Gauges
from chairlift.seats import Member, Step
from protos.v1 import common_pb2, router_pb2

_ENDS = {
    common_pb2.FINISH_REASON_STOP: End.FINISHED,
    common_pb2.FINISH_REASON_LENGTH: End.FINISHED,
    common_pb2.FINISH_REASON_UNSPECIFIED: End.PREEMPTED,
}


def step_of(summary: router_pb2.StepSummary) -> Step:
    """Whose rows it had and who left. A request's first choice goes by the request's own name."""
    members = tuple(
        Member(
            member.seq_id,
            f"{member.request_id}/{member.index}" if member.index else member.request_id,
            member.padding,
        )
        for member in summary.members
    )
    left = frozenset(leaver.seq_id for leaver in summary.left)
    return Step(summary.step_id, members, left, summary.num_dropped)


def frame_of(summary: router_pb2.StepSummary) -> Frame:
    """The whole of it."""
    computing = [member for member in summary.members if not member.padding]
    return Frame(
        step_of(summary),
        chunks=frozenset(
            member.seq_id
            for member in computing
            if member.prefill or member.num_tokens - member.num_draft_tokens > 1
        ),
        num_sampled=sum(not member.prefill for member in computing),
        ends={leaver.seq_id: _ENDS.get(leaver.reason, End.CANCELLED) for leaver in summary.left},
        gauges=Gauges(
            num_running=summary.num_running,
            num_waiting=summary.num_waiting,
            max_num_seqs=summary.max_num_seqs,
            num_blocks=summary.num_blocks,
            num_free_blocks=summary.num_free_blocks,
            num_cached_blocks=summary.num_cached_blocks,
            step_us=summary.previous_step_us,
            idle_us=summary.previous_idle_us,
            num_accepted_tokens=summary.num_accepted_tokens,
            queue=tuple((group.priority, group.tenant, group.num_waiting) for group in summary.waiting),
        ),
    )

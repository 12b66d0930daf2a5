"""What becomes of those who wait for a beginning that another one computes, when that one goes before.

There may be thousands, of one prompt. To look at all of them again, only to find that the next one has begun
to compute what the others want, would make a step long, and whoever sends and cancels could do that each
time. So the first of each line looks again, and the others follow it: a line is a tenant's in one class of
the queue, and they would not be served before it anyway. Pure.
"""

from typing import TYPE_CHECKING

from scheduler.sequence import Follower, Sequence
from scheduler.waiting import Line

if TYPE_CHECKING:
    from scheduler.core import SchedulerCore


def hand_on(core: "SchedulerCore", leader: Sequence) -> None:
    """`leader` is not the one who computes what its followers wait for: it is over, or not served next."""
    if not leader.followers:
        return
    items = [
        (core.waiting.line_of(item.seq), item) for item in leader.followers if core.is_a_follower(item.seq)
    ]
    leader.followers = []
    firsts: dict[Line, Follower] = {}
    for line, item in items:
        first = firsts.setdefault(line, item)
        if core.waiting.comes_before(item.seq, first.seq):
            firsts[line] = item
    for line, item in items:
        first = firsts[line]
        if item.seq is not first.seq:  # both share so much with `leader`, and so with each other
            first.seq.followers.append(Follower(item.seq, min(item.num_tokens, first.num_tokens)))
    core.unpark_followers([item.seq for item in firsts.values()])

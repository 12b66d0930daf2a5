"""What becomes of those who wait for a beginning that another one computes, when that one goes before.

There may be thousands, of one prompt. To look at all of them again, only to find that the next one has begun
to compute what the others want, would make a step long, and whoever sends and cancels could do that each
time. So the first of each line looks again, and the others follow it: a line is a tenant's in one class of
the queue, and they would not be served before it anyway. The first takes its line over as it is: when it
goes in its turn, the next one is found without looking at all of them. Pure.
"""

import heapq

from scheduler.sequence import FollowerLine, Sequence
from scheduler.waiting import Line, WaitingQueue


def hand_on(waiting: WaitingQueue, leader: Sequence) -> list[Sequence]:
    """Takes its followers from `leader`; returns the first of each line, whom the others of it follow now."""
    inherited, leader.inherited = leader.inherited, None
    taken, leader.followers = leader.followers, []
    lines: dict[Line, FollowerLine] = {}
    if inherited is not None:
        lines[waiting.line_of(inherited.heap[0][-1])] = inherited
    for item in taken:
        if waiting.is_parked_freely(item.seq):
            line = lines.setdefault(waiting.line_of(item.seq), FollowerLine([], 0))
            if line is not inherited:  # less than they share is safe to say: then they look again too soon
                line.most_tokens = max(line.most_tokens, item.num_tokens)
            rank = waiting.rank_in_line(item.seq)
            heapq.heappush(line.heap, (rank, item.seq.order, item.num_tokens, item.seq))
    firsts = [_first(waiting, line) for line in lines.values()]
    return [seq for seq in firsts if seq is not None]


def _first(waiting: WaitingQueue, line: FollowerLine) -> Sequence | None:
    """Whom the others of `line` follow now; None when nobody of it waits for its beginning any more."""
    while line.heap:
        _, _, num_tokens, seq = heapq.heappop(line.heap)
        if waiting.is_parked_freely(seq):
            if line.heap:
                line.most_tokens = min(line.most_tokens, num_tokens)
                seq.followers = seq.take_followers()
                seq.inherited = line
            return seq
    return None

"""Hands on the sequences that wait for a shared prefix when the sequence that computes it leaves.

There may be thousands with the same prompt. Looking at all of them again, only to find that the next one has
begun to compute what the others want, would make for a long step, and a client could cause that again and
again by sending and cancelling. So only the first of each line looks again, and the others follow it: a line
is a tenant's sequences in one class of the queue, and these would not be served before the first anyway. The
first takes over its line as it is: when it leaves in its turn, the next is found without looking at all of
them. Pure.
"""

import heapq

from scheduler.sequence import FollowerLine, Sequence
from scheduler.waiting import Line, WaitingQueue


def hand_on(waiting: WaitingQueue, leader: Sequence) -> list[Sequence]:
    """Takes the followers from `leader`; returns the first of each line, which the rest of it now follow."""
    inherited, leader.inherited = leader.inherited, None
    taken, leader.followers = leader.followers, []
    lines: dict[Line, FollowerLine] = {}
    if inherited is not None:
        lines[waiting.line_of(inherited.heap[0][-1])] = inherited
    for item in taken:
        if waiting.is_parked_freely(item.seq):
            line = lines.setdefault(waiting.line_of(item.seq), FollowerLine([], 0))
            if line is not inherited:  # too low a bound is safe: they only look again too soon
                line.most_tokens = max(line.most_tokens, item.num_tokens)
            rank = waiting.rank_in_line(item.seq)
            heapq.heappush(line.heap, (rank, item.seq.order, item.num_tokens, item.seq))
    firsts = [_first(waiting, line) for line in lines.values()]
    return [seq for seq in firsts if seq is not None]


def _first(waiting: WaitingQueue, line: FollowerLine) -> Sequence | None:
    """The sequence that the others of `line` now follow; None when none of it waits for a prefix any more."""
    while line.heap:
        _, _, num_tokens, seq = heapq.heappop(line.heap)
        if waiting.is_parked_freely(seq):
            if line.heap:
                line.most_tokens = min(line.most_tokens, num_tokens)
                seq.followers = seq.take_followers()
                seq.inherited = line
            return seq
    return None

"""Decides what is to blame for an answer that does not fit: the executor, or what it computed.

A request can be to blame: a kernel may fail at one shape. So the rows of the plan are suspects, as if the
executor had died (`suspects`). But at an executor that answers everything wrongly, each request looks guilty
as soon as it is alone. So an executor that answered wrongly gets no client's request before it has rehearsed
with a short made-up one, in a core of its own (`executor_loop`).

    answers wrongly ─► rehearses ─► right: attached again, and what it answers wrongly then counts
                          ▲    └──► wrong: fenced for a while, twice as long each time; no request is to blame
                          └────────────────┘

Pure: what is asked, and whether the answer was right.
"""

from array import array

from scheduler.plan import Capacity
from scheduler.sequence import FinishReason, Request, Sequence

NUM_TOKENS = 4  # of prompt and of output each; fewer if there is no room for them
REQUEST_ID = "rehearsal"


def num_tokens(max_total_tokens: int) -> int:
    """Length of the prompt, and of the output."""
    return max(1, min(NUM_TOKENS, max_total_tokens // 2))


def request(capacity: Capacity, count: int, sampling: bytes) -> Request:
    """A request of the last `count` ids of the vocabulary, for as many output tokens, as `sampling` says."""
    last = capacity.vocab_size - 1
    prompt = array("I", [max(0, last - index) for index in range(count)])
    return Request(REQUEST_ID.encode().ljust(16), REQUEST_ID, prompt, sampling, count, ignore_eos=True)


def fault_of(seq: Sequence) -> str | None:
    """What was wrong with the end of a rehearsal; None when it was right."""
    finish, wanted = seq.finish, seq.request.max_tokens
    assert finish is not None
    if finish.reason is FinishReason.LENGTH and seq.num_output_tokens == wanted:
        return None
    why = f": {finish.message}" if finish.message else ""
    return f"{finish.reason.name} after {seq.num_output_tokens} of {wanted} tokens{why}"

"""Exactly once towards one router: which sequences it reads, and how far.

The outbox is a cursor into each sequence's token log, not a queue of messages: nothing in the step loop waits
for a router, and a slow one gets fewer, larger messages. A state machine without I/O; the servicer only moves
what `take` returns.

    attach(handle, seq, n)      tokens from the n-th on are owed
    touch(seq)                  it has news
    take(now) ─► StepOutput     what is owed, once; None if nothing is, or too much is unacknowledged
    acked(message_id) ─► done   sequences whose end the router has: their records may go
    close() ─► orphans          the stream broke: sequences that now have no reader

When a router has left a stream for a new one, messages on the old stream may still be read after the first
ones of the new. So streams are numbered, and `superseded` says which are over when one begins.

Must not know: protobuf, text, the queue.
"""

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler.sequence import Finish, FinishReason, Sequence, StatusCode
from scheduler.token_ids import TokenIds

MAX_UNACKED_MESSAGES = 8  # more in flight only fills the transport's buffers
# In one message: a router that returns may be owed more than the smallest --max-message-bytes (1 MiB).
MAX_TOKENS = 1 << 16
MAX_LOGPROBS = 1 << 11  # entries, each some 300 bytes with its alternatives
_TAKEN_OVER = Finish(
    FinishReason.ERROR,
    message="another stream goes on with this request",
    status_code=StatusCode.ABORTED,
)


@dataclass(slots=True, eq=False)
class Attachment:
    """One handle of one stream: the reader of a sequence, and how many output tokens it was sent."""

    session: "RouterSession"
    handle: int
    seq: Sequence
    cursor: int
    prompt_cursor: int = 0  # log-probabilities of the prompt that were sent
    is_dirty: bool = False
    has_told_accepted: bool = False
    has_told_start: bool = False
    finish_message_id: int = 0  # the message that carried its end; 0 before that


@dataclass(frozen=True, slots=True)
class FinishedOutput:
    """The end of one handle: its sequence ended, was refused, or now has another reader."""

    handle: int
    finish: Finish
    num_cached_tokens: int = 0
    num_wasted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Columns of new tokens: `handles[i]` got the next `num_tokens[i]` of `token_ids`."""

    message_id: int
    handles: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    token_ids: TokenIds = field(default_factory=lambda: array("I"))
    logprobs: list[tuple[int, list[object]]] = field(default_factory=list)
    # handle, position of the first, and one entry per position from there on
    prompt_logprobs: list[tuple[int, int, list[object]]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # handles
    started: list[tuple[int, int]] = field(default_factory=list)  # handle, cached prompt tokens
    finished: list[FinishedOutput] = field(default_factory=list)


class SessionError(RuntimeError):
    """The router broke the rules of the stream, which ends with this sentence."""


class RouterSession:
    """One stream of one router."""

    __slots__ = (
        "_dirty",
        "_ends",
        "_next_message_id",
        "_unacked",
        "attachments",
        "is_superseded",
        "router_id",
        "stream",
    )

    def __init__(self, router_id: str, stream: int = 0) -> None:
        """`stream`: number of this stream; 0 from a router that does not count them."""
        self.router_id = router_id
        self.stream = stream
        self.is_superseded = False
        """The router has a newer stream: what still arrives on this one is ignored."""
        self.attachments: dict[int, Attachment] = {}
        self._dirty: list[Attachment] = []
        self._ends: list[FinishedOutput] = []  # for handles that have no sequence here
        self._next_message_id = 1
        self._unacked: deque[tuple[int, float, list[Attachment]]] = deque()  # id, time sent, ends in it

    def is_newer_than(self, other: "RouterSession") -> bool:
        """Whether the router has left `other` for this stream."""
        return self.router_id == other.router_id and self.stream > other.stream > 0

    def attach(self, handle: int, seq: Sequence, num_received: int) -> "RouterSession | None":
        """From now on `handle` reads `seq`, of which the router has `num_received` output tokens.

        Returns the session that read it before, if there was one: the newest reader wins, and the older one's
        handle ends.
        """
        self.check_new(handle)
        before = seq.attachment
        attachment = Attachment(self, handle, seq, num_received)
        self.attachments[handle] = attachment
        seq.attachment = attachment
        self._mark(attachment)
        if not isinstance(before, Attachment):
            return None
        before.session._lose(before)  # noqa: SLF001  (one module, one machine)
        return before.session

    def refuse(self, handle: int, finish: Finish) -> None:
        """The request behind `handle` is not accepted."""
        self.check_new(handle)
        self._ends.append(FinishedOutput(handle, finish))

    def check_new(self, handle: int) -> None:
        """Raises SessionError when the handle is in use."""
        if handle in self.attachments:
            raise SessionError(f"handle {handle} is in use on this stream")

    def _lose(self, attachment: Attachment) -> None:
        del self.attachments[attachment.handle]
        if not attachment.finish_message_id:
            self._ends.append(FinishedOutput(attachment.handle, _TAKEN_OVER))

    def _mark(self, attachment: Attachment) -> None:
        if not attachment.is_dirty:
            attachment.is_dirty = True
            self._dirty.append(attachment)

    @property
    def has_news(self) -> bool:
        """Whether anything is owed."""
        return bool(self._dirty or self._ends)

    def take(self, now: float) -> StepOutput | None:
        """What is owed, as one message; None if nothing is, or if the router must acknowledge first."""
        if not self.has_news or len(self._unacked) >= MAX_UNACKED_MESSAGES:
            return None
        output = StepOutput(self._next_message_id, finished=self._ends)
        ends: list[Attachment] = []
        for_the_next: list[Attachment] = []
        logprobs_room = MAX_LOGPROBS
        for attachment in self._dirty:
            seq = attachment.seq
            if seq.attachment is not attachment:
                continue  # it has another reader now
            if not attachment.has_told_accepted:
                attachment.has_told_accepted = True
                output.accepted.append(attachment.handle)
            if seq.has_started and not attachment.has_told_start:
                attachment.has_told_start = True
                output.started.append((attachment.handle, seq.num_cached_tokens))
            # In this order: the prompt's log-probabilities, then tokens, then the end.
            is_caught_up = True
            if seq.prompt_logprobs is not None:
                logprobs_room -= self._take_prompt_logprobs(
                    attachment, seq.prompt_logprobs, output, logprobs_room
                )
                is_caught_up = attachment.prompt_cursor == len(seq.prompt_logprobs)
            if is_caught_up:
                count = self._take_tokens(attachment, output, logprobs_room)
                logprobs_room -= count if seq.logprobs is not None else 0
                is_caught_up = seq.num_prompt_tokens + attachment.cursor >= len(seq.token_ids)
            if not is_caught_up:
                for_the_next.append(attachment)
                continue
            attachment.is_dirty = False
            if seq.finish is not None and not attachment.finish_message_id:
                attachment.finish_message_id = output.message_id
                output.finished.append(
                    FinishedOutput(
                        attachment.handle, seq.finish, seq.num_cached_tokens, seq.num_wasted_tokens
                    )
                )
                ends.append(attachment)
        self._dirty = for_the_next
        self._ends = []
        self._next_message_id += 1
        self._unacked.append((output.message_id, now, ends))
        return output

    @staticmethod
    def _take_prompt_logprobs(
        attachment: Attachment, known: list[object], output: StepOutput, room: int
    ) -> int:
        """Adds as many as are owed and there is room for; returns how many."""
        start = attachment.prompt_cursor
        count = min(len(known) - start, room)
        if count > 0:
            output.prompt_logprobs.append((attachment.handle, start + 1, known[start : start + count]))
            attachment.prompt_cursor += count
        return count

    @staticmethod
    def _take_tokens(attachment: Attachment, output: StepOutput, logprobs_room: int) -> int:
        """Adds as many as are owed and there is room for; returns how many."""
        seq = attachment.seq
        start = seq.num_prompt_tokens + attachment.cursor
        count = min(len(seq.token_ids) - start, MAX_TOKENS - len(output.token_ids))
        if seq.logprobs is not None:
            count = min(count, logprobs_room)
        if count <= 0:
            return 0
        output.handles.append(attachment.handle)
        output.num_tokens.append(count)
        if count == 1:
            output.token_ids.append(seq.token_ids[start])
        else:
            output.token_ids.extend(seq.token_ids[start : start + count])
        if seq.logprobs is not None:
            first = attachment.cursor - seq.num_resumed_tokens
            output.logprobs.append((attachment.handle, seq.logprobs[first : first + count]))
        attachment.cursor += count
        return count

    def acked(self, message_id: int) -> list[Sequence]:
        """The router has everything up to `message_id`; returns the sequences whose end it now has."""
        if message_id >= self._next_message_id:
            raise SessionError(
                f"message {message_id} was acknowledged, the newest is {self._next_message_id - 1}"
            )
        done: list[Sequence] = []
        while self._unacked and self._unacked[0][0] <= message_id:
            for attachment in self._unacked.popleft()[2]:
                if attachment.seq.attachment is attachment:
                    del self.attachments[attachment.handle]
                    attachment.seq.attachment = None
                    done.append(attachment.seq)
        return done

    def oldest_unacked(self) -> float | None:
        """When the oldest unacknowledged message was taken; None if all are acknowledged."""
        return self._unacked[0][1] if self._unacked else None

    def close(self) -> list[Sequence]:
        """The stream is gone. Returns the sequences that now have no reader."""
        orphans = [item.seq for item in self.attachments.values() if item.seq.attachment is item]
        for seq in orphans:
            seq.attachment = None
        self.attachments.clear()
        self._dirty.clear()
        self._ends.clear()
        self._unacked.clear()
        return orphans


def superseded(new: RouterSession, others: Iterable[RouterSession]) -> list[RouterSession]:
    """The streams that are over when `new` begins: older ones of its router, or `new` if it comes late."""
    others = list(others)
    if any(other.is_newer_than(new) for other in others):
        return [new]
    return [other for other in others if new.is_newer_than(other)]


def session_of(seq: Sequence) -> RouterSession | None:
    """The session that reads `seq`, or None."""
    return seq.attachment.session if isinstance(seq.attachment, Attachment) else None


def touch(seq: Sequence) -> RouterSession | None:
    """`seq` has news: marks it for its reader, whose session is returned (None if it has no reader)."""
    attachment = seq.attachment
    if not isinstance(attachment, Attachment):
        return None
    attachment.session._mark(attachment)  # noqa: SLF001  (one module, one machine)
    return attachment.session

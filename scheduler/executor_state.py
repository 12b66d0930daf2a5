"""One attached executor as the core sees it: what it can take, what runs there, which blocks are held.

Pure data, and a few numbers derived from it. Written by the core and its parts during a call of the core;
`is_away` is written by `epoch`, which knows the stream.
"""

from collections import deque

from scheduler.batching import Batching
from scheduler.blocks import BlockError, BlockManager
from scheduler.drafting import DRAFT_TOKENS, Drafting
from scheduler.executor_session import ExecutorSession
from scheduler.pace import Pace
from scheduler.plan import Capacity, Leaver
from scheduler.policy import Limits
from scheduler.prefix_cache import PrefixCache
from scheduler.sequence import Sequence
from scheduler.step_clock import StepClock
from scheduler.step_time import StepTimeModel
from scheduler.tenants import Tenant


class ExecutorState:
    """One attached executor: what it can take, what runs there, which blocks are held."""

    __slots__ = (
        "batching",
        "blocks",
        "cache",
        "capacity",
        "clock",
        "crowded",
        "drafting",
        "entering_padding",
        "executor_id",
        "fault",
        "has_ghosts",
        "held_until",
        "is_away",
        "is_draining",
        "is_still_looking",
        "leaves_at",
        "left",
        "look_again_at",
        "made_way_for",
        "max_num_batched_tokens",
        "max_num_seqs",
        "next_seq_id",
        "num_accepted_tokens",
        "num_put_behind",
        "num_queued_tokens",
        "num_running_of",
        "pace",
        "previous_idle_us",
        "previous_step_us",
        "released_seq_ids",
        "running",
        "session",
        "step_time",
        "to_register",
        "too_full_for",
        "watermark_blocks",
    )

    def __init__(
        self,
        executor_id: str,
        epoch: int,
        capacity: Capacity,
        limits: Limits,
        batching: Batching,
        cache_secret: bytes,
    ) -> None:
        num_blocks = min(capacity.num_blocks, limits.num_blocks or capacity.num_blocks)
        self.executor_id = executor_id
        self.capacity = capacity
        self.batching = batching
        self.session = ExecutorSession(epoch, min(limits.window, capacity.max_window))
        self.blocks = BlockManager(num_blocks, capacity.block_size)
        self.cache = PrefixCache(
            self.blocks,
            secret=cache_secret,
            fingerprint=capacity.model_fingerprint,
            is_on=limits.prefix_caching,
        )
        self.max_num_batched_tokens = min(
            capacity.max_num_batched_tokens, limits.max_num_batched_tokens or capacity.max_num_batched_tokens
        )
        # No more seats than tokens in a step, so that each decoding sequence can have one.
        self.max_num_seqs = min(
            capacity.max_num_seqs,
            limits.max_num_seqs or capacity.max_num_seqs,
            self.max_num_batched_tokens,
        )
        most = limits.num_speculative_tokens
        self.drafting = Drafting(most) if most and DRAFT_TOKENS in capacity.features else None
        self.watermark_blocks = int(limits.watermark * num_blocks)
        self.step_time = StepTimeModel()
        self.clock = StepClock()
        self.pace = Pace(self.clock)
        self.held_until: float | None = None  # the next plan must not leave before this time
        self.running: dict[int, Sequence] = {}  # by seq_id, in order of admission
        self.num_running_of: dict[int, int] = {}  # by importance class
        self.too_full_for: Sequence | None = None  # next sequence: it found no room, and none has left since
        self.entering_padding: list[Sequence] = []  # padding rows that enter with the next plan
        self.released_seq_ids: list[int] = []  # told to the executor with the next plan
        self.has_ghosts = False  # the executor still remembers a finished sequence
        self.left: list[Leaver] = []  # since the last plan, for watchers
        self.next_seq_id = 1
        self.is_draining = False
        self.leaves_at = 0.0  # while it drains: the latest time at which it leaves
        self.is_away = False  # its stream is broken: it may come back with the same epoch
        self.num_queued_tokens = 0  # tokens that running sequences still need, beyond the plans made so far
        self.look_again_at: float | None = None  # it is idle, and left a sequence to another executor
        self.to_register: deque[tuple[Sequence, int, int]] = deque()  # full blocks still to be named
        self.made_way_for: Sequence | None = None  # enters first in this plan
        self.crowded: dict[Tenant, None] = {}  # tenants whose own block limit stops a sequence
        self.fault: BlockError | None = None  # blocks and their holders disagree: the epoch must end
        # It is not yet known what to admit: a long prompt is still being hashed, or very many sequences turn
        # out to be too late. Plan again even if nothing else happens.
        self.is_still_looking = False
        self.num_put_behind = 0  # too late, and put behind in this plan
        self.num_accepted_tokens = 0  # draft tokens that were right, for watchers
        self.previous_step_us = 0  # of the newest answered step that had rows, for watchers
        self.previous_idle_us = 0

    def release(self, seq: Sequence) -> None:
        """`seq` gives up its blocks. A disagreement is kept for the next plan to raise."""
        try:
            self.blocks.release(seq.block_table)
        except BlockError as error:
            self.fault = error

    def take_seat(self, seq: Sequence) -> None:
        """`seq` is now in the batch, under its seq_id."""
        self.running[seq.seq_id] = seq
        priority = seq.request.priority
        self.num_running_of[priority] = self.num_running_of.get(priority, 0) + 1

    def give_seat_back(self, seq: Sequence) -> None:
        """`seq` is no longer in the batch."""
        del self.running[seq.seq_id]
        self.too_full_for = None
        priority = seq.request.priority
        self.num_running_of[priority] -= 1
        if not self.num_running_of[priority]:
            del self.num_running_of[priority]

    @property
    def least_important(self) -> int | None:
        """The largest priority value among the running sequences; None if there are none."""
        return max(self.num_running_of, default=None)

    def num_freed(self, seq: Sequence) -> int:
        """Blocks that come free when `seq` releases its own: those that it shares stay held."""
        return self.blocks.num_private(seq.block_table)

    def recompute_tokens(self, seq: Sequence) -> int:
        """Computed tokens lost when `seq` releases its blocks; those in shared blocks are found again."""
        num_shared = len(seq.block_table) - self.num_freed(seq)
        return max(0, seq.num_computed_tokens - num_shared * self.blocks.block_size)

    def tokens_beside(self, num_decoding: int, max_step_us: float | None) -> int:
        """Tokens that a step has for prompts beside `num_decoding` decoding sequences.

        While anything decodes, chunks may only fill up the target duration of a step, `max_step_us`. They
        never get less than one block of tokens: newcomers progress even if decoding alone takes longer.
        """
        left = self.max_num_batched_tokens - num_decoding
        if max_step_us is None or not num_decoding:
            return left
        within = self.step_time.tokens_within(max_step_us)
        return left if within is None else min(left, max(within - num_decoding, self.blocks.block_size))

    def suits(self, seq: Sequence) -> bool:
        """Whether `seq` can ever be computed here."""
        return seq.max_len <= self.max_total_tokens and seq.request.needs <= self.capacity.features

    @property
    def max_total_tokens(self) -> int:
        """Longest prompt plus output, in tokens, that can ever run here."""
        return min(self.capacity.max_seq_len, self.blocks.num_blocks * self.blocks.block_size)

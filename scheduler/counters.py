"""What a scheduler has counted since it started, and what one result changed. Pure."""

from collections import Counter
from dataclasses import dataclass, field

from scheduler.sequence import FinishReason, Sequence


@dataclass(slots=True)
class Outcome:
    """What a result changed: sequences with new tokens, and sequences that ended (some are in both)."""

    progressed: list[Sequence] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    steps: int = 0
    preemptions: int = 0  # for lack of blocks
    displacements: int = 0  # for a more important sequence
    scheduled_tokens: int = 0
    wasted_tokens: int = 0  # sampled, never delivered
    draft_tokens: int = 0  # guesses sent
    draft_tokens_accepted: int = 0  # those that were right
    refused: int = 0
    ended: Counter[FinishReason] = field(default_factory=Counter)
    recoveries: int = 0  # sequences that lost their executor
    executors_left: int = 0  # on purpose, or because this scheduler stopped
    executors_crashed: int = 0
    prefix_query_tokens: int = 0  # at executors that have gone
    prefix_hit_tokens: int = 0
    audits_failed: int = 0

"""What the steps of one executor changed in its batch, in as few values as possible.

A follower that knows a batch's members can apply the changes and so knows every step's rows. Most steps
change nothing: the same rows decode again, and are only counted. Pure; must not know when or to whom the
changes are sent.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.plan import BatchPlan, Leaver
from scheduler.sequence import Sequence


@dataclass(slots=True)
class StepChange:
    """One step, compared with the one before it."""

    step_id: int
    entered: list[tuple[int, Sequence]] = field(default_factory=list)  # with seq_id
    left: list[Leaver] = field(default_factory=list)
    chunks: list[tuple[int, int, bool]] = field(default_factory=list)
    """Chunks of prompts: seq_id, tokens, and whether the row samples no token yet."""
    still: list[int] = field(default_factory=list)  # seq_ids that have a seat but no row
    num_alike: int = 0
    """Steps right after it in which no sequence entered or left and the same rows computed one token each,
    guesses not counted."""


class BatchChanges:
    """The batch of one executor within one epoch."""

    def __init__(self) -> None:
        self.steps: list[StepChange] = []  # since `told`, oldest first
        self.step_id = 0
        self.is_fresh = True  # nothing was sent yet
        self._seated: dict[int, Sequence] = {}
        self._row_ids: list[int] | None = None  # of the previous step, if all its rows decoded

    @property
    def seated(self) -> Mapping[int, Sequence]:
        """Sequences that have a seat, by seq_id, in order of entering."""
        return self._seated

    def take(self, plan: BatchPlan) -> None:
        """Adds a step."""
        num_rows = len(plan.seq_ids)
        num_decoding = plan.num_tokens.count(1) + len(plan.draft_tokens)
        all_decode = num_decoding == num_rows and 0 not in plan.num_samples
        is_next = plan.step_id == self.step_id + 1
        self.step_id = plan.step_id
        if all_decode and is_next and self.steps and not plan.left and plan.seq_ids == self._row_ids:
            self.steps[-1].num_alike += 1
            return
        self._row_ids = plan.seq_ids if all_decode else None
        change = StepChange(plan.step_id)
        seated = self._seated
        for leaver in plan.left:
            if seated.pop(leaver.seq_id, None) is not None:
                change.left.append(leaver)
        for seq_id, seq in zip(plan.seq_ids, plan.rows, strict=True):
            if seq_id not in seated:
                seated[seq_id] = seq
                change.entered.append((seq_id, seq))
        if not all_decode:
            change.chunks = [
                (seq_id, count, num_samples == 0)
                for seq_id, count, num_samples, seq in zip(
                    plan.seq_ids, plan.num_tokens, plan.num_samples, plan.rows, strict=True
                )
                if (count > 1 or num_samples == 0) and not (seq.is_padding or seq_id in plan.draft_tokens)
            ]
        if num_rows != len(seated):
            moving = set(plan.seq_ids)
            change.still = [seq_id for seq_id in seated if seq_id not in moving]
        self.steps.append(change)

    def told(self) -> None:
        """The changes so far were sent to the followers."""
        self.steps = []
        self.is_fresh = False

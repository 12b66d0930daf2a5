"""Which sequence sits where: the batch's membership, step by step, as seats of a chairlift.

Pure: from what each step did to rows for people. A batch has members and no seats; drawn as seats, one sees
at a glance who left and who took the place while the others rode on.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

EMPTY = "·"


@dataclass(frozen=True, slots=True)
class Member:
    """One sequence with a row in a step; `padding` when the row computes nothing that anybody gets."""

    seq_id: int
    name: str
    padding: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """What one iteration did. `left` are the seq_ids of those that left since the step before."""

    step_id: int
    members: tuple[Member, ...]
    left: frozenset[int] = frozenset()
    num_dropped: int = 0
    """Steps that were not told of before this one."""


@dataclass(frozen=True, slots=True)
class Row:
    """A step in which the membership changed."""

    step_id: int
    seats: tuple[str, ...]
    """Name of who sits there, or EMPTY."""
    left: tuple[str, ...]
    entered: tuple[tuple[str, int], ...]
    """Name and seat, counted from 1."""

    def __str__(self) -> str:
        story = [f"{name} left" for name in self.left]
        story += [f"{name} takes seat {seat}" for name, seat in self.entered]
        return f"step {self.step_id:>5}   {' '.join(self.seats)}   {', '.join(story)}"


class Seats:
    """Seats of one executor, filled from the first on.

    A sequence keeps its seat until it is told to have left, also through steps in which it has no row.
    """

    def __init__(self, num_seats: int) -> None:
        self._seats: list[Member | None] = [None] * num_seats

    @property
    def seated(self) -> tuple[Member | None, ...]:
        """Who sits where, None where nobody does."""
        return tuple(self._seats)

    def take(self, step: Step) -> Row | None:
        """Moves people as the step did; the row for it, or None when everybody stayed."""
        present = {member.seq_id for member in step.members}
        left = []
        for seat, member in enumerate(self._seats):
            if member is None or member.seq_id in present:
                continue
            # Nobody tells of padding that leaves, but it has a row in every step. After a gap the story is
            # unknown: who has no row now may have left in it.
            if member.seq_id in step.left or member.padding or step.num_dropped:
                self._seats[seat] = None
                left.append(member.name)
        seated = {member.seq_id for member in self._seats if member}
        newcomers = [member for member in step.members if member.seq_id not in seated]
        entered = tuple((member.name, self._sit(member)) for member in newcomers)
        if not left and not entered:
            return None
        names = tuple(member.name if member else EMPTY for member in self._seats)
        return Row(step.step_id, names, tuple(left), entered)

    def _sit(self, member: Member) -> int:
        if None not in self._seats:
            self._seats.append(None)
        seat = self._seats.index(None)
        self._seats[seat] = member
        return seat + 1


def picture(steps: Iterable[Step], *, num_seats: int, letters: Mapping[str, str]) -> list[Row]:
    """The rows of a run; members go by their letters, padding by small ones; others are left out."""
    seats = Seats(num_seats)
    rows = [seats.take(_lettered(step, letters)) for step in steps]
    return [row for row in rows if row is not None]


def _lettered(step: Step, letters: Mapping[str, str]) -> Step:
    members = tuple(
        Member(
            member.seq_id,
            letters[member.name].lower() if member.padding else letters[member.name],
            member.padding,
        )
        for member in step.members
        if member.name in letters
    )
    return Step(step.step_id, members, step.left, step.num_dropped)

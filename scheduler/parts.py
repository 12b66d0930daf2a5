"""Assembles long prompts, which arrive in parts so that a cancel never waits behind them. Pure."""

from array import array
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from scheduler.router_session import SessionError
from scheduler.token_ids import TokenIds

Submit = TypeVar("Submit")


@dataclass(slots=True)
class _Partial(Generic[Submit]):
    first: Submit
    key: bytes
    count: int
    num_parts: int = 1
    token_ids: TokenIds = field(default_factory=lambda: array("I"))


class PartAssembler(Generic[Submit]):
    """Collects the parts for each handle of one stream."""

    def __init__(self) -> None:
        self._partials: dict[int, _Partial[Submit]] = {}

    def __len__(self) -> int:
        return len(self._partials)

    def add(
        self, handle: int, index: int, count: int, submit: Submit, key: bytes, token_ids: TokenIds
    ) -> tuple[Submit, TokenIds] | None:
        """Once its last part is in, the first message and all prompt ids; else None. Raises SessionError."""
        if index == 0:
            if handle in self._partials:
                raise SessionError(
                    f"handle {handle} begins a second time before its first prompt is complete"
                )
            self._partials[handle] = _Partial(submit, key, count)
        partial = self._partials.get(handle)
        if partial is None:
            return None  # given up halfway: ignore the rest
        if index and (index != partial.num_parts or count != partial.count):
            raise SessionError(
                f"handle {handle}: part {index} of {count} after {partial.num_parts} of {partial.count}"
            )
        partial.num_parts = index + 1
        partial.token_ids += token_ids
        if partial.num_parts < partial.count:
            return None
        del self._partials[handle]
        return partial.first, partial.token_ids

    def give_up(self, key: bytes) -> list[int]:
        """Drops the parts collected under `key`; returns their handles."""
        handles = [handle for handle, partial in self._partials.items() if partial.key == key]
        for handle in handles:
            del self._partials[handle]
        return handles

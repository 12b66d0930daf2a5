from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chairlift.able_toy import Wrong, make_able
from tests.chairlift.toys import Spoil, draws_by, failing, method
from tests.rig import toy_executor

RIGHT = "right draft tokens are taken"
WRONG = "wrong draft tokens are forgotten"
ENDS = "an end among draft tokens ends"
CHOICE = "draft tokens change no choice"

Speak = Callable[[Any, Any, Any, list[int]], None]
"""Is given how a right executor speaks behind draft tokens, the result, the sequence and its draft."""


def speaks(broken: Speak) -> Spoil:
    def given_the_right_way(right: Any) -> Any:
        def speak(self: Any, result: Any, sequence: Any, draft: list[int]) -> None:
            sequence.row_began = len(sequence.tokens)
            broken(lambda draft: right(self, result, sequence, draft), result, sequence, draft)

        return speak

    return method(toy_executor.Epoch, "speak", given_the_right_way)


def chooses(broken: Callable[[Any, Callable[[], int]], int]) -> Spoil:
    """Is given the sequence, and how a right executor chooses its next token."""
    return method(
        toy_executor.Sequence,
        "next_token",
        lambda right: lambda sequence: broken(sequence, lambda: int(right(sequence))),
    )


def both(*spoils: Spoil) -> Spoil:
    def spoil(monkeypatch: pytest.MonkeyPatch, executor: toy_executor.ToyExecutor) -> None:
        for each in spoils:
            each(monkeypatch, executor)

    return spoil


def rightly(right: Any, _: Any, __: Any, draft: list[int]) -> None:
    right(draft)


def checks_the_first_alone(right: Any, _: Any, __: Any, draft: list[int]) -> None:
    right(draft[:1])


def checks_none(right: Any, _: Any, __: Any, draft: list[int]) -> None:
    right([])


def believes_the_scheduler(right: Any, result: Any, sequence: Any, draft: list[int]) -> None:
    sequence.tokens += draft
    result.token_ids.extend(draft)
    right([])


def samples_once_more(right: Any, _: Any, sequence: Any, draft: list[int]) -> None:
    right(draft)
    if draft and sequence.ended_step is None:
        right([])


def counts_wrong_ones_as_computed(right: Any, _: Any, sequence: Any, draft: list[int]) -> None:
    right(draft)
    sequence.computed += max(0, sequence.row_began + len(draft) + 1 - len(sequence.tokens))


def keeps_wrong_ones(right: Any, _: Any, sequence: Any, draft: list[int]) -> None:
    right(draft)
    sequence.stale = draft[len(sequence.tokens) - sequence.row_began :]


def reads_what_was_kept(sequence: Any, right: Callable[[], int]) -> int:
    """As if the KV of what was guessed wrongly were not overwritten."""
    tokens = sequence.tokens
    sequence.tokens = [*tokens, *getattr(sequence, "stale", [])]
    chosen = right()
    sequence.tokens = tokens
    return chosen


def holds_ends_back_by_the_row(sequence: Any, right: Callable[[], int]) -> int:
    """Whether an end may come is decided once for all tokens of a row."""
    held = sequence.row_began - sequence.new.num_prompt_tokens < sequence.sampling.min_tokens
    asked, sequence.sampling.min_tokens = sequence.sampling.min_tokens, toy_executor.MAX_LEN if held else 0
    chosen = right()
    sequence.sampling.min_tokens = asked
    return chosen


def looks_for_stop_ids_once(right: Any, _: Any, sequence: Any, draft: list[int]) -> None:
    """Behind a right guess it goes on, whatever was guessed."""
    ends = sequence.ends
    sequence.ends = set() if draft else ends
    right(draft)
    sequence.ends = ends


def able(**wrong: Any) -> Spoil:
    def spoil(monkeypatch: pytest.MonkeyPatch, executor: toy_executor.ToyExecutor) -> None:
        make_able(monkeypatch, executor, Wrong(**wrong))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (speaks(rightly), set()),
        (speaks(checks_the_first_alone), {RIGHT, WRONG, ENDS, CHOICE}),
        (speaks(checks_none), {RIGHT, WRONG, ENDS, CHOICE}),
        (speaks(samples_once_more), {RIGHT, WRONG, CHOICE}),
        (speaks(believes_the_scheduler), {WRONG, ENDS, CHOICE}),
        (speaks(counts_wrong_ones_as_computed), {WRONG, CHOICE}),
        (both(speaks(keeps_wrong_ones), chooses(reads_what_was_kept)), {WRONG, CHOICE}),
        (speaks(looks_for_stop_ids_once), {ENDS, CHOICE}),
        (both(speaks(rightly), chooses(holds_ends_back_by_the_row)), {CHOICE}),
        (
            both(
                speaks(rightly),
                draws_by(lambda sequence, _: sequence.row_began - sequence.new.num_prompt_tokens),
            ),
            {CHOICE},
        ),
        (able(tells_of_the_last=True), {CHOICE}),
        (able(counts_by_the_row=True), {CHOICE}),
    ],
)
async def test_an_executor_that_takes_draft_tokens_wrongly_fails_the_check_of_that_rule(
    spoil: Spoil, expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await failing(spoil, tmp_path, monkeypatch) == expected

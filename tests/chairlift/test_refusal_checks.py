from pathlib import Path
from typing import Any

import pytest

from protos.v1 import executor_pb2
from tests.chairlift.toys import Spoil, believing, computing_all, failing, method
from tests.rig import toy_executor


def _answers_what_was_acknowledged(answer: Any) -> Any:
    def broken(self: toy_executor.Epoch, plan: Any) -> Any:
        if plan.step_id <= self.acked:
            return executor_pb2.StepResult(epoch=self.number, step_id=plan.step_id)
        return answer(self, plan)

    return broken


def _releases_a_plan_later(run: Any) -> Any:
    def broken(self: toy_executor.Epoch, plan: Any) -> Any:
        late = self.__dict__.setdefault("late", [])
        now, late[:] = list(late), list(plan.released_seq_ids)
        changed = type(plan)()
        changed.CopyFrom(plan)
        changed.released_seq_ids[:] = now
        return run(self, changed)

    return broken


def _keeps_sequences(monkeypatch: pytest.MonkeyPatch, _: toy_executor.ToyExecutor) -> None:
    init, kept = toy_executor.Epoch.__init__, dict[int, toy_executor.Sequence]()

    def init_with_kept(self: toy_executor.Epoch) -> None:
        init(self)
        self.sequences = kept

    monkeypatch.setattr(toy_executor.Epoch, "__init__", init_with_kept)


def _grants_a_term_twice(monkeypatch: pytest.MonkeyPatch, executor: toy_executor.ToyExecutor) -> None:
    open_ = executor.Open

    async def open_at_the_same_term(request: Any, context: Any) -> Any:
        if request.term == executor.term:
            executor.holder = request.scheduler_id
        return await open_(request, context)

    monkeypatch.setattr(executor, "Open", open_at_the_same_term)


def _names_itself_anew(monkeypatch: pytest.MonkeyPatch, executor: toy_executor.ToyExecutor) -> None:
    open_ = executor.Open

    async def open_under_another_name(request: Any, context: Any) -> Any:
        executor.instance_id += "x"
        return await open_(request, context)

    monkeypatch.setattr(executor, "Open", open_under_another_name)


def _without_the_feature(monkeypatch: pytest.MonkeyPatch, executor: toy_executor.ToyExecutor) -> None:
    """Offers no draft tokens, and takes them."""
    open_ = executor.Open

    async def open_with_less(request: Any, context: Any) -> Any:
        response = await open_(request, context)
        del response.features[:]
        return response

    monkeypatch.setattr(executor, "Open", open_with_less)


def _joins_entries(run: Any) -> Any:
    def broken(self: toy_executor.Epoch, plan: Any) -> Any:
        changed = type(plan)()
        changed.CopyFrom(plan)
        joined: dict[int, list[int]] = {}
        for entry in plan.draft_tokens:
            joined.setdefault(entry.seq_id, []).extend(entry.token_ids)
        del changed.draft_tokens[:]
        for seq_id, token_ids in joined.items():
            changed.draft_tokens.add(seq_id=seq_id, token_ids=token_ids)
        return run(self, changed)

    return broken


def _counts_ends_too_far(most_drafts: Any) -> Any:
    return lambda self: most_drafts(self) + 1


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (believing("acked_step_id"), {"acknowledgements name results"}),
        (believing(" came after step "), {"steps without a gap"}),
        (
            method(toy_executor.Epoch, "answer", _answers_what_was_acknowledged),
            {"acknowledgements name results"},
        ),
        (believing("ragged rows"), {"columns fit"}),
        (believing("ragged growth"), {"columns fit"}),
        (believing("ragged blocks"), {"columns fit"}),
        (believing("too many rows"), {"capacity is kept"}),
        (believing("too many tokens"), {"capacity is kept"}),
        (believing("two rows"), {"rows fit"}),
        (believing("a row of nothing"), {"rows fit"}),
        (believing("past the known"), {"rows fit"}),
        (believing("past its blocks"), {"blocks grow"}),
        (believing("grows and is unknown"), {"unknown sequences are refused"}),
        (
            believing("row's sequence is unknown"),
            {
                "unknown sequences are refused",
                "open forgets sequences",
                "releases",
                "acknowledged ghost is forgotten",
            },
        ),
        (_without_the_feature, {"draft tokens not offered are refused"}),
        (believing("two entries"), {"entries of draft tokens fit"}),
        (method(toy_executor.Epoch, "run", _joins_entries), {"entries of draft tokens fit"}),
        (believing("without a row"), {"entries of draft tokens fit"}),
        (believing("an entry without"), {"entries of draft tokens fit"}),
        (believing("token outside the vocabulary"), {"entries of draft tokens fit"}),
        (believing("does not reach its draft"), {"draft tokens fit their row"}),
        (believing("more draft tokens"), {"draft tokens fit their row"}),
        (
            method(toy_executor.Sequence, "most_drafts", _counts_ends_too_far),
            {"draft tokens fit their row"},
        ),
        (believing("not acknowledged"), {"draft tokens are acknowledged first"}),
        (believing("seq_id 0"), {"admissions fit"}),
        (believing("a prompt without"), {"admissions fit"}),
        (believing("nothing is left"), {"admissions fit"}),
        (believing("was used before"), {"seq id is used once"}),
        (believing("no such block"), {"blocks exist"}),
        (believing("a reserved field"), {"reserved fields are refused"}),
        (believing("too many plans"), {"window is kept"}),
        (believing("positions_sum"), {"positions agree"}),
        (computing_all("no room"), {"too long a sequence is not computed"}),
        (method(toy_executor.Epoch, "run", _releases_a_plan_later), {"unknown sequences are refused"}),
        (_keeps_sequences, {"open forgets sequences"}),
        (_grants_a_term_twice, {"lower term is refused"}),
        (_names_itself_anew, {"capacity is told"}),
    ],
)
async def test_an_executor_that_does_not_refuse_fails_the_check_of_that_rule(
    spoil: Spoil, expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await failing(spoil, tmp_path, monkeypatch) == expected

"""The sampler that waits for nothing, beside the one that does: the same tokens, the same reports."""

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor import late_sampler, sampler
from executor.adjustments import adjustment_of
from executor.constraints import ConstraintError
from executor.late_sampler import FilterRows, filter_by_sorting
from executor.parcel import Parcel
from executor.plan import SamplingParams
from executor.rows import Sampled, SampleRow
from executor.staging import Staging
from tests.rig.fake_device import FakeDevice, Recording

torch.set_num_threads(1)

VOCAB_SIZE = 40


def sample_late(
    logits: torch.Tensor,
    rows: list[SampleRow],
    last: list[int],
    in_flight: list[bool],
    filter_rows: FilterRows = filter_by_sorting,
) -> Sampled:
    device = FakeDevice()
    asked_for = late_sampler.wishes(rows, in_flight, logits.shape[-1])
    arrays = Staging(device).put(asked_for.arrays)
    with Recording():  # raises when the host reads a number
        parts = late_sampler.chosen(
            logits.clone(), torch.tensor(last), arrays, max(asked_for.num_tops, default=0), filter_rows
        )
    parcel, arrived = Parcel.send(parts, device), device.event()
    arrived.record()
    arrived.wait()
    return late_sampler.sampled(parcel.unpack(), asked_for)


class OnlyThese:
    """A matcher."""

    fault: str | None = None

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    def allowed(self) -> np.ndarray:
        if not self._token_ids:
            self.fault = "nothing can match"
            raise ConstraintError(self.fault)
        allowed = np.zeros(VOCAB_SIZE, dtype=np.bool_)
        allowed[self._token_ids] = True
        return allowed


some_ids = st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=4)
params = st.builds(
    dict,
    temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 5, VOCAB_SIZE, 100]),
    top_p=st.sampled_from([1.0, 1.0, 0.2, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    seed=st.integers(-(2**63), 2**63 - 1),
    logprobs=st.sampled_from([None, None, 0, 3, 20]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.7, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.7]),
    logit_bias=st.sampled_from([(), ((3, 2.0), (9, -50.0))]),
    allowed_token_ids=st.one_of(st.just(frozenset()), some_ids),
    banned_token_ids=some_ids,
)
rows_of_a_step = st.lists(
    st.tuples(
        params,
        st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6),  # prompt
        st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6),  # output
        st.booleans(),  # its last token is in flight
        st.sampled_from([(), (), (1, 2)]),  # masked ids
        st.sampled_from([None, None, None, [], [1, 2], [5, 6, 7]]),  # what a constraint allows
    ),
    min_size=1,
    max_size=5,
)
kinds_of_logits = st.sampled_from(["many", "ties", "NaN", "infinite"])


@settings(max_examples=150, deadline=None)
@given(asked=rows_of_a_step, kind=kinds_of_logits, seed=st.integers(0, 2**32 - 1))
def test_it_chooses_what_the_sampler_chooses_though_last_tokens_are_in_flight(
    asked: list[Any], kind: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal((len(asked), VOCAB_SIZE)) * 3
    logits = torch.from_numpy(np.round(numbers) if kind == "ties" else numbers).float()
    if kind in {"NaN", "infinite"}:
        logits[0, 3] = torch.nan if kind == "NaN" else torch.inf
    known, late, last, in_flight = [], [], [], []
    for wanted, prompt, output, may_be_late, masked, allowed in asked:
        options = SamplingParams(max_tokens=64, **wanted)
        is_late = may_be_late and bool(output) and allowed is None
        in_flight.append(is_late)
        last.append((prompt + output)[-1])
        for rows, seen in ((known, output), (late, output[:-1] if is_late else output)):
            matcher: Any = None if allowed is None else OnlyThese(allowed)
            rows.append(
                SampleRow(options, len(output), masked, adjustment_of(options, prompt, seen), matcher)
            )
    # As text: a NaN that no rule kept out is in both.
    assert repr(sample_late(logits, late, last, in_flight)) == repr(sampler.sample(logits.clone(), known))


def test_a_lone_row_sums_as_it_does_in_company() -> None:
    weights = torch.rand(3, 5000)
    together = late_sampler.running_sums(weights)
    assert all(late_sampler.running_sums(weights[i : i + 1]).equal(together[i : i + 1]) for i in range(3))


def large_rows(vocab_size: int) -> tuple[torch.Tensor, list[SampleRow]]:
    """Six rows of logits, and what they ask for."""
    logits = torch.from_numpy(np.random.default_rng(0).standard_normal((6, vocab_size))).float()
    wanted: list[dict[str, Any]] = [
        {"top_p": 0.95},
        {"top_k": 2000},
        {"min_p": 0.01},
        {},
        {"top_k": 3},
        {"top_p": 0.1},
    ]
    rows = [SampleRow(SamplingParams(max_tokens=9, seed=i, **each), 0, ()) for i, each in enumerate(wanted)]
    return logits, rows


def test_a_large_vocabulary_is_filtered_alike() -> None:
    logits, rows = large_rows(5000)
    assert sample_late(logits, rows, [0] * 6, [False] * 6) == sampler.sample(logits.clone(), rows)

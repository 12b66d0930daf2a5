"""Steps on a GPU, launched one after the other while earlier ones still run.

    launch k      arrays (one copy) -> token ids, some of step k - 1 -> layers -> logits -> choice -> parcel
    launch k + 1  the same, right after it in the stream; the host has not seen the tokens of step k
    collect k     wait for the mark after step k's parcel, unpack it

With one exception, nothing between `launch` and `collect` waits for the device. The exception: what a
constraint allows depends on the token before, so the choice of a constrained row (but not its forward pass)
waits until the step before is settled.

When the host launches step k + 1, it does not know the ids of the tokens that step k sampled. It writes `-1 -
i` for the token of the i-th row of step k that samples, and the device replaces this by the id.

If there are several ranks, each has a pipeline over its shard. The first one launches; the others `follow`
with the same arrays, and get the ids that it chose, on the device.

Knows no plan and no end of a sequence. Use it from one thread.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor import late_logprobs, late_sampler, logprobs
from executor.accelerator import Accelerator, Event
from executor.captured import CapturedDecode
from executor.device import StepOutput
from executor.inputs import StepBatch, StepInputs
from executor.kv_cache import KVCache, begun_blocks
from executor.late_sampler import Wishes
from executor.model.decoder import Decoder, Hidden
from executor.operations.base import StepTensors
from executor.operations.plain import PlainOperations
from executor.parallel.ranks import Alone, Ranks
from executor.parcel import Parcel
from executor.plan import PromptLogprobs
from executor.rows import IN_FLIGHT, Sampled
from executor.staging import Staging, StepArrays, arrays_of

BEGUN: Final = "begun"
"""Name of the array of blocks that the step begins to fill."""
NO_WISHES: Final = Wishes({}, {}, [], [])


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device has been asked for."""

    batch: StepBatch
    wishes: Wishes
    parcel: Parcel | None
    started: Event
    forwarded: Event
    ended: Event
    before: Event | None
    """the end of the step before"""

    def wait(self) -> None:
        """Return when its results are on the host."""
        self.ended.wait()


@dataclass(frozen=True, slots=True)
class _Forwarded:
    """A step whose layers have been asked for."""

    hidden: Hidden
    token_ids: Tensor
    """all of them known: int64 `[T]`, and the padding"""
    there: dict[str, Tensor]
    """the step's arrays on the device, by their names"""


class Pipeline:
    """The steps of one model over one cache."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: Decoder,
        operations: PlainOperations,
        kv_cache: KVCache,
        *,
        vocab_size: int,
        captured: CapturedDecode | None = None,
        ranks: Ranks | None = None,
        tells_others: bool = True,
    ) -> None:
        """`operations` are those of this rank's shard, `vocab_size` is the whole model's.

        With `tells_others` the first rank tells the others of each step; without, they know of it.
        """
        ranks = Alone() if ranks is None else ranks
        self._leading = ranks.leading if tells_others else lambda _: nullcontext()
        self._share = ranks.share
        self._accelerator = accelerator
        self._model = model
        self._operations = operations
        self._kv_cache = kv_cache
        self._vocab_size = vocab_size
        self._captured = captured
        self._staging = Staging(accelerator)
        self._last: Launched | None = None
        self._last_ids: Tensor | None = None

    @torch.inference_mode()
    def launch(self, batch: StepBatch, settle_before: Callable[[], None]) -> Launched:
        """Ask for a step.

        `settle_before` is called when a row needs to know the token that the step before sampled for it.
        """
        started, forwarded, ended = (self._accelerator.event() for _ in range(3))
        in_flight = batch.inputs.token_ids[batch.inputs.logits_indices] == IN_FLIGHT
        must_settle = any(
            late and row.matcher is not None for late, row in zip(in_flight, batch.sample_rows, strict=True)
        )
        wishes = NO_WISHES if must_settle else self._wishes(batch, in_flight.tolist())
        inputs = self._addressed(batch, in_flight)

        with self._leading(inputs):
            started.record()
            step = self._forward(inputs, _scored_ids(inputs) | wishes.arrays)
            parts = self._scores(step.hidden, inputs, step.there)
            logits = self._model.head(step.hidden) if batch.sample_rows else None
            forwarded.record()
            given = step.there
            if must_settle:
                settle_before()
                wishes = self._wishes(batch, [False] * len(batch.sample_rows))
                given = self._staging.put(wishes.arrays)
            self._last_ids = None
            if logits is not None:
                last_tokens = step.token_ids[step.there["logits_indices"]]
                most_tops = max(wishes.num_tops, default=0)
                chosen = late_sampler.chosen(
                    logits, last_tokens, given, most_tops, self._operations.filter_rows
                )
                self._last_ids = self._share(chosen["token_ids"])
                parts |= chosen
            parcel = Parcel.send(parts, self._accelerator) if parts else None
            ended.record()
        before = None if self._last is None else self._last.ended
        self._last = Launched(batch, wishes, parcel, started, forwarded, ended, before)
        return self._last

    @torch.inference_mode()
    def follow(self, inputs: StepInputs) -> None:
        """Ask for what a step of the first rank needs of this one, which is another. Nothing is collected."""
        hidden = self._forward(inputs, {}).hidden
        for scored in inputs.scored:
            for indices in logprobs.slices(scored, self._vocab_size, self._accelerator.device):
                self._model.head(hidden, indices)
        self._last_ids = None
        if len(inputs.logits_indices):
            self._model.head(hidden)
            # Room for what the first rank chooses.
            self._last_ids = self._share(torch.empty_like(hidden.step.logits_indices))

    def collect(self, launched: Launched) -> StepOutput:
        """A step's results. Waits for them; steps are collected in their order."""
        launched.wait()
        numbers = {} if launched.parcel is None else launched.parcel.unpack()
        sampled = Sampled([], [], [])
        if launched.batch.sample_rows:
            sampled = late_sampler.sampled(numbers, launched.wishes)
        before = launched.before
        return StepOutput(
            sampled,
            _prompt_logprobs(launched.batch.inputs, numbers),
            launched.forwarded.us_since(launched.started),
            launched.ended.us_since(launched.forwarded),
            idle_us=0 if before is None else max(0, launched.started.us_since(before)),
        )

    def forget(self) -> None:
        """The next step begins anew: nothing before it counts."""
        self._last = self._last_ids = None

    def close(self) -> None:
        """Let go of captured work: a connection between ranks that it uses cannot end before it."""
        self._captured = None

    def _wishes(self, batch: StepBatch, in_flight: Sequence[bool]) -> Wishes:
        return late_sampler.wishes(batch.sample_rows, in_flight, self._vocab_size)

    def _begun(self, inputs: StepInputs) -> dict[str, NDArray[np.generic]]:
        if not self._operations.attention.needs_clean_tails:
            return {}
        blocks = begun_blocks(inputs.slot_mapping, self._kv_cache.block_size)
        return {BEGUN: blocks} if len(blocks) else {}

    def _addressed(self, batch: StepBatch, in_flight: NDArray[np.bool_]) -> StepInputs:
        """The step's arrays, tokens in flight by the rows of the step before."""
        inputs = batch.inputs
        if not in_flight.any():
            return inputs
        assert self._last is not None, "a token in flight was sampled by the step before"
        place_of = {seq_id: place for place, seq_id in enumerate(self._last.batch.sampled_seq_ids)}
        seq_ids = np.array(batch.sampled_seq_ids)[in_flight].tolist()
        token_ids = inputs.token_ids.copy()
        token_ids[inputs.logits_indices[in_flight]] = [-1 - place_of[seq_id] for seq_id in seq_ids]
        return replace(inputs, token_ids=token_ids)

    def _forward(self, inputs: StepInputs, more: dict[str, NDArray[np.generic]]) -> _Forwarded:
        """Ask for the layers of a step; `more` arrays go to the device in the same copy."""
        begun = self._begun(inputs)
        size = None if self._captured is None else self._captured.size_for(inputs)
        if self._captured is not None and size is not None:
            inputs = self._captured.padded(inputs, size)
        there = self._staging.put(arrays_of(inputs) | begun | more)
        if BEGUN in there:
            self._kv_cache.clear(there[BEGUN])
        arrays = StepArrays(**{name: there[name] for name in StepArrays.__slots__})
        if (inputs.token_ids < 0).any():
            arrays = replace(arrays, token_ids=self._known(arrays.token_ids))
        if self._captured is None or size is None:
            hidden = self._model.layers(self._operations.arrange(inputs, arrays), self._kv_cache)
        else:
            step = StepTensors(arrays.token_ids, arrays.positions, arrays.logits_indices, attention=None)
            hidden = Hidden(self._captured.run(arrays, size), step)
        return _Forwarded(hidden, arrays.token_ids, there)

    def _known(self, token_ids: Tensor) -> Tensor:
        """With the ids of tokens in flight."""
        assert self._last_ids is not None, "a token in flight was sampled by the step before"
        places = (-1 - token_ids).clamp(min=0)
        return torch.where(token_ids < 0, self._last_ids[places], token_ids)

    def _scores(self, hidden: Hidden, inputs: StepInputs, there: dict[str, Tensor]) -> dict[str, Tensor]:
        """What prompts' log-probabilities are worded from, slice by slice."""
        parts: dict[str, Tensor] = {}
        for number, scored in enumerate(inputs.scored):
            token_ids, start = there[_scored_name(number)], 0
            for indices in logprobs.slices(scored, self._vocab_size, self._accelerator.device):
                wanted = token_ids[start : start + len(indices)]
                logits = self._model.head(hidden, indices)
                slice_parts = late_logprobs.report_parts(
                    logprobs.table_of(logits), wanted, min(scored.stretch.num_top, self._vocab_size)
                )
                slice_parts["finite"] = logits.amax(dim=-1).isfinite().all()[None]
                parts |= {
                    f"{_scored_name(number)} {start} {name}": part for name, part in slice_parts.items()
                }
                start += len(indices)
        return parts


def _scored_name(number: int) -> str:
    return f"scored {number}"


def _scored_ids(inputs: StepInputs) -> dict[str, NDArray[np.generic]]:
    return {
        _scored_name(number): np.array(scored.stretch.token_ids, dtype=np.int64)
        for number, scored in enumerate(inputs.scored)
    }


def _prompt_logprobs(inputs: StepInputs, numbers: dict[str, NDArray[np.generic]]) -> list[PromptLogprobs]:
    """Reports on the scored stretches, but for those whose logits are no numbers."""
    reports = []
    for number, scored in enumerate(inputs.scored):
        stretch = scored.stretch
        slices: dict[int, dict[str, NDArray[np.generic]]] = {}
        for name, part in numbers.items():
            if name.startswith(f"{_scored_name(number)} "):
                start, _, kind = name.removeprefix(f"{_scored_name(number)} ").partition(" ")
                slices.setdefault(int(start), {})[kind] = part
        if not all(parts["finite"].all() for parts in slices.values()):
            continue
        tokens = []
        for first, parts in slices.items():
            token_ids = stretch.token_ids[first : first + len(parts["ranks"])]
            tokens += late_logprobs.reports(parts, token_ids, [stretch.num_top] * len(token_ids))
        reports.append(PromptLogprobs(stretch.seq_id, stretch.first_position, tokens))
    return reports

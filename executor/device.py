"""The device as the protocol side sees it: what it is asked for, and what comes back.

`Runner` and `Pipeline` are protocols: `runner` and `pipeline` implement them with torch. This module does not
need it, nor do the two that drive a device (`work`, `late_work`).

Must not know: plans, protos, streams, threads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from executor.constraints import MatcherOf
from executor.inputs import StepBatch, StepInputs
from executor.plan import PromptLogprobs
from executor.rows import Sampled, SampleRow


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """What two processes must share for their numbers to mean the same; "" is *not known*."""

    model: str
    """digest of the weights"""
    tokenizer: str
    """digest of the vocabulary"""
    numerics: str
    """what the bits of the logits depend on beside the weights"""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step chose, and the microseconds that the forward pass and the sampling took.

    `sampled` has one entry for each sampling row. `prompt_logprobs` are those of the stretches that
    `StepInputs.scored` names, without any that are no numbers; they belong to the forward pass. `idle_us` is
    how long the device stood still before the step, where it was launched ahead; else 0.
    """

    sampled: Sampled
    prompt_logprobs: list[PromptLogprobs]
    forward_us: int
    sample_us: int
    idle_us: int = 0


class Pipeline(Protocol):
    """A device that is asked for steps and waited for later."""

    def launch(self, batch: StepBatch, settle_before: Callable[[], None]) -> Any:
        """Ask for a step. What is returned can `wait()`, in any thread, and is to be collected."""

    def collect(self, launched: Any) -> StepOutput:
        """A launched step's results, in the order of the launches."""

    def forget(self) -> None:
        """Drop the memory of the last step: the next one takes no tokens and no idle time from it."""


class Runner(Protocol):
    """A model on a device, as the protocol side needs it. Called from the device's thread alone."""

    @property
    def num_blocks(self) -> int:
        """KV blocks that plans may use."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""

    @property
    def max_seq_len(self) -> int:
        """Longest sequence, tokens."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence."""

    @property
    def fingerprints(self) -> Fingerprints:
        """What the parts are."""

    @property
    def dtype(self) -> str:
        """Number type of the computation."""

    @property
    def device(self) -> str:
        """Kind of device."""

    @property
    def features(self) -> tuple[str, ...]:
        """Names of optional abilities, such as "logprobs"."""

    @property
    def row_invariant(self) -> bool:
        """Whether a token's logits are bit-identical whatever the batch, the chunks and the cache."""

    @property
    def matcher_of(self) -> MatcherOf | None:
        """What may follow output ids under a constraint; None where outputs cannot be constrained."""

    @property
    def pipeline(self) -> Pipeline | None:
        """The device as one that works while the host goes on; None when each step is waited for."""

    def warm_up(self) -> None:
        """Make one real token. Raises when the device cannot."""

    def work_ahead(self) -> bool:
        """Do a few milliseconds of what later steps would wait for; returns whether there was any."""

    def step(self, inputs: StepInputs, sample_rows: Sequence[SampleRow]) -> StepOutput:
        """Compute one step."""


def fault_of(runner: Runner) -> BaseException | None:
    """What keeps the device from making a token; None when it can. Makes one."""
    try:
        runner.warm_up()
    except Exception as error:  # noqa: BLE001 - whatever it is, the device is lost
        return error
    return None


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Where one step's time went, microseconds. `idle_us` is the gap since the epoch's step before."""

    idle_us: int = 0
    inputs_us: int = 0
    forward_us: int = 0
    sample_us: int = 0
    total_us: int = 0

"""Plans, results and capacities: what the scheduler's core exchanges with an executor, as local values.

The messages of `protos/v1/executor.proto` without protobuf; `wire` translates. Pure data.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from scheduler.sequence import FinishReason, Sequence, StatusCode
from scheduler.token_ids import TokenIds


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an executor can take, from its `Open` answer: the only source of upper limits."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_seq_len: int
    max_window: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    row_invariant: bool = False
    instance_id: str = ""
    model_fingerprint: str = ""
    tokenizer_fingerprint: str = ""
    numerics_fingerprint: str = ""
    dtype: str = ""
    version: str = ""
    features: frozenset[str] = frozenset()  # names of optional abilities


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that the executor has not seen. vLLM: NewRequestData."""

    seq_id: int
    token_ids: Seq[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling: bytes
    prompt_logprobs_from: int | None = None  # position of the first prompt token that wants one
    traceparent: str = ""  # the span that its computation is part of; empty: none


@dataclass(frozen=True, slots=True)
class Leaver:
    """A sequence that left the batch; `reason` is None when it did not end and waits again."""

    seq: Sequence
    seq_id: int
    reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One iteration. vLLM: SchedulerOutput. Columns: position i of `seq_ids`, `num_tokens`, … is one row."""

    epoch: int
    step_id: int
    acked_step_id: int
    released_seq_ids: list[int]
    admitted: list[NewSequence]
    seq_ids: list[int]
    num_tokens: list[int]
    grown_seq_ids: list[int]
    num_new_blocks: list[int]
    new_block_ids: list[int]
    positions_sum: int
    num_samples: list[int]  # not sent: tokens that each row must sample; with draft tokens, the fewest
    rows: list[Sequence]  # not sent: the sequences of the rows, for the result
    filled: list[tuple[Sequence, int, int]]  # not sent: (row, seq_id, computed tokens once this is answered)
    outgrown: list[tuple[Sequence, int, int]]  # not sent: the same, for rows that only began a new block
    left: list[Leaver]  # not sent: those that left since the last plan, for watchers
    draft_tokens: dict[int, TokenIds] = field(default_factory=dict)  # sent: by seq_id


@dataclass(frozen=True, slots=True)
class FinishedSequence:
    """The executor's report that a sequence ended."""

    seq_id: int
    reason: FinishReason
    matched_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class SequenceError:
    """A sequence that cannot be computed; the others go on."""

    seq_id: int
    message: str
    status_code: StatusCode = StatusCode.INTERNAL


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one plan. vLLM: ModelRunnerOutput. Times in microseconds."""

    epoch: int
    step_id: int
    seq_ids: list[int]
    num_sampled: list[int]
    token_ids: list[int]
    logprobs: dict[int, list[object]] = field(default_factory=dict)  # seq_id → one opaque entry per token
    # seq_id → position of the first, and one opaque entry per position from there on
    prompt_logprobs: dict[int, tuple[int, list[object]]] = field(default_factory=dict)
    finished: list[FinishedSequence] = field(default_factory=list)
    errors: list[SequenceError] = field(default_factory=list)
    draining: bool = False
    seconds_to_leave: float = 0.0  # with draining; 0: not told
    total_us: int = 0
    idle_us: int = 0

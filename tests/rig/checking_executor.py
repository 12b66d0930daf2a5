"""An executor in memory that believes nothing: it checks every rule of the step protocol as plans arrive.

Works on the scheduler's local plans, without a wire. Its KV cache is a list of tokens, one for each slot, and
before a token is "sampled" the whole context is read back through the block table and compared. So a block
that was freed too early, shared by mistake or grown too late shows up as a wrong context, in the step where
it happens. The next token is a function of the context alone, and a third of all texts repeat themselves.
"""

from array import array
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from scheduler.plan import BatchPlan, Capacity, FinishedSequence, NewSequence, StepResult
from scheduler.sequence import FinishReason, Request
from scheduler.token_ids import NO_IDS, TokenIds

VOCAB_SIZE = 97
EOS = 96


def next_token(context: TokenIds) -> int:
    """What the model says after this context; one token in 97 ends the sequence."""
    seen = context[-1:] if context[0] % 3 == 0 else context
    return crc32(seen.tobytes()) % VOCAB_SIZE


def expected_output(request: Request, start: TokenIds | None = None) -> tuple[list[int], FinishReason]:
    """The undisturbed output, and how it ends."""
    context = request.prompt_token_ids + (start or array("I"))
    output = list(start or [])
    while True:
        if output and output[-1] == EOS and not request.ignore_eos:
            return output, FinishReason.STOP
        if len(output) >= request.max_tokens:
            return output, FinishReason.LENGTH
        token = next_token(context)
        context.append(token)
        output.append(token)


def prompt_report(position: int, token_id: int) -> object:
    """What stands for the log-probability of a prompt's token."""
    return ("prompt", position, token_id)


def capacity(**overrides: Any) -> Capacity:
    values: dict[str, Any] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_seq_len": 256,
        "max_window": 2,
        "vocab_size": VOCAB_SIZE,
    }
    return Capacity(**(values | overrides), eos_token_ids=frozenset({EOS}))


@dataclass
class _Held:
    new: NewSequence
    token_ids: TokenIds
    block_ids: list[int]
    num_computed: int
    max_len: int
    ignore_eos: bool
    is_ghost: bool = False
    ended_in: int = 0
    drafted_in: int = 0  # the newest step that had draft tokens of it


@dataclass
class CheckingExecutor:
    """One epoch. `send` takes a plan; `run` computes the oldest one and returns its result."""

    capacity: Capacity
    epoch: int
    requests: dict[bytes, Request]  # by encoded sampling: how the executor learns limits in these tests
    slots: list[int] = field(default_factory=list)
    plans: deque[BatchPlan] = field(default_factory=deque)
    held: dict[int, _Held] = field(default_factory=dict)
    seen_ids: set[int] = field(default_factory=set)
    last_step_id: int = 0
    step_us: int = 0  # what each step is said to have taken; 0 is something that grows with its tokens
    tokens_per_step: list[int] = field(default_factory=list)
    members_per_step: list[list[int]] = field(default_factory=list)
    holders: Counter[int] = field(default_factory=Counter)  # live sequences that have a block in their table

    def __post_init__(self) -> None:
        self.slots = [-1] * (self.capacity.num_blocks * self.capacity.block_size)

    def send(self, plan: BatchPlan) -> None:
        assert plan.epoch == self.epoch
        assert plan.step_id == (self.plans[-1].step_id if self.plans else self.last_step_id) + 1
        self.plans.append(plan)
        assert len(self.plans) <= self.capacity.max_window
        assert plan.acked_step_id < plan.step_id

    def run(self, *, fail: int | None = None) -> StepResult:
        """Computes the oldest plan. `fail`: the index of a row that ends in error."""
        plan = self.plans.popleft()
        self.last_step_id = plan.step_id
        for seq_id in [
            seq_id
            for seq_id, item in self.held.items()
            if item.is_ghost and item.ended_in <= plan.acked_step_id
        ]:
            del self.held[seq_id]
        for seq_id in plan.released_seq_ids:
            self.held.pop(seq_id, None)
        for new in plan.admitted:
            self._admit(new)
        self._grow(plan)
        return self._compute(plan, fail)

    def _admit(self, new: NewSequence) -> None:
        assert new.seq_id not in self.seen_ids, "a seq_id is used twice in an epoch"
        self.seen_ids.add(new.seq_id)
        request = self.requests.get(new.sampling)
        if request is None:  # padding
            max_len, ignore_eos = self.capacity.max_seq_len, True
        else:
            max_len, ignore_eos = new.num_prompt_tokens + request.max_tokens, request.ignore_eos
            assert new.num_prompt_tokens == len(request.prompt_token_ids)
        token_ids = array("I", new.token_ids)
        if new.prompt_logprobs_from is not None:
            assert request is not None, "padding wants no log-probabilities"
            assert new.num_computed_tokens < new.prompt_logprobs_from < new.num_prompt_tokens
        self.held[new.seq_id] = _Held(
            new, token_ids, list(new.block_ids), new.num_computed_tokens, max_len, ignore_eos
        )

    def _grow(self, plan: BatchPlan) -> None:
        at = 0
        for seq_id, count in zip(plan.grown_seq_ids, plan.num_new_blocks, strict=True):
            if seq_id in self.held:
                self.held[seq_id].block_ids += plan.new_block_ids[at : at + count]
            at += count
        assert at == len(plan.new_block_ids)
        live = [block for item in self.held.values() if not item.is_ghost for block in item.block_ids]
        assert all(0 <= block < self.capacity.num_blocks for block in live)
        self.holders = Counter(live)

    def _compute(self, plan: BatchPlan, fail: int | None) -> StepResult:
        assert len(plan.seq_ids) <= self.capacity.max_num_seqs
        assert len(plan.seq_ids) == len(set(plan.seq_ids))
        assert sum(plan.num_tokens) <= self.capacity.max_num_batched_tokens
        assert not plan.draft_tokens or "draft_tokens" in self.capacity.features
        assert plan.draft_tokens.keys() <= set(plan.seq_ids)
        self.tokens_per_step.append(sum(plan.num_tokens))
        self.members_per_step.append(list(plan.seq_ids))
        result = StepResult(
            plan.epoch, plan.step_id, [], [], [], total_us=self.step_us or 100 + 10 * sum(plan.num_tokens)
        )
        positions_sum = 0
        for row, (seq_id, count) in enumerate(zip(plan.seq_ids, plan.num_tokens, strict=True)):
            item = self.held[seq_id]
            positions_sum += item.num_computed
            if item.is_ghost:
                item.num_computed += count
                continue
            if row == fail:
                self._fail(plan, item, result)
                continue
            self._row(plan, seq_id, item, count, result)
        assert positions_sum == plan.positions_sum
        return result

    def _fail(self, plan: BatchPlan, item: _Held, result: StepResult) -> None:
        from scheduler.plan import SequenceError

        result.errors.append(SequenceError(item.new.seq_id, "the logits hold NaN"))
        item.is_ghost, item.ended_in = True, plan.step_id
        item.num_computed += plan.num_tokens[plan.seq_ids.index(item.new.seq_id)]

    def _row(self, plan: BatchPlan, seq_id: int, item: _Held, count: int, result: StepResult) -> None:
        assert count >= 1
        assert item.drafted_in <= plan.acked_step_id, "where a row begins cannot be known yet"
        draft = plan.draft_tokens.get(seq_id, NO_IDS)
        known, end = len(item.token_ids), item.num_computed + count
        assert end <= known + len(draft), "a row goes past the known tokens"
        assert end <= len(item.block_ids) * self.capacity.block_size, "a token has no slot"
        if draft:
            assert end == known + len(draft), "a row with draft tokens does not reach them"
            assert end < item.max_len, "more tokens are guessed than there will be"
            item.drafted_in = plan.step_id
        fed = item.token_ids + draft
        for position in range(item.num_computed, end):
            slot = self._slot(item, position)
            assert self.holders[slot // self.capacity.block_size] == 1, "a row writes into a shared block"
            self.slots[slot] = fed[position]
        if item.new.prompt_logprobs_from is not None:
            told = range(
                max(item.num_computed + 1, item.new.prompt_logprobs_from),
                min(end + 1, item.new.num_prompt_tokens),
            )
            if told:
                entries = [prompt_report(position, item.token_ids[position]) for position in told]
                result.prompt_logprobs[seq_id] = (told[0], entries)
        item.num_computed = min(end, known)
        context = self._context(item, end)
        assert context == fed[:end], f"sequence {seq_id} reads somebody else's context"
        result.seq_ids.append(seq_id)
        result.num_sampled.append(0)
        if end < known:
            return
        self._sample(plan, item, [*draft, None], result)

    def _sample(self, plan: BatchPlan, item: _Held, guesses: list[int | None], result: StepResult) -> None:
        """One token, and one behind each guess that was right."""
        seq_id, context = item.new.seq_id, item.token_ids
        for guess in guesses:
            token = next_token(context)
            item.num_computed = len(context)
            context.append(token)
            result.num_sampled[-1] += 1
            result.token_ids.append(token)
            reason = None
            if token == EOS and not item.ignore_eos:
                reason = FinishReason.STOP
            elif len(context) >= item.max_len:
                reason = FinishReason.LENGTH
            if reason is not None:
                matched = token if reason is FinishReason.STOP else None
                result.finished.append(FinishedSequence(seq_id, reason, matched))
                item.is_ghost, item.ended_in = True, plan.step_id
            if reason is not None or token != guess:
                return

    def _context(self, item: _Held, end: int) -> "array[int]":
        """What is in the first `end` slots of its blocks."""
        size = self.capacity.block_size
        found = array("I")
        for block_id in item.block_ids[: -(-end // size)]:
            found.extend(self.slots[block_id * size : block_id * size + min(size, end - len(found))])
        return found

    def _slot(self, item: _Held, position: int) -> int:
        size = self.capacity.block_size
        return item.block_ids[position // size] * size + position % size

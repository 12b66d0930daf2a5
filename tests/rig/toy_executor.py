"""A step-protocol executor from scratch, as a stranger would write it from docs/protocol.md.

Nothing of ours but the stubs. To its "model" a hash of the whole context is the likeliest token, and each id
after it less likely; so the next token is a function of the sequence and its seed alone. Run:
`python -m tests.rig.toy_executor unix:/tmp/toy.sock`.
"""

import asyncio
import itertools
import math
import random
import sys
import zlib
from typing import Any
from urllib.parse import quote

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from protos.v1 import common_pb2, executor_pb2, executor_pb2_grpc

NUM_BLOCKS, BLOCK_SIZE, MAX_ROWS, MAX_TOKENS, MAX_LEN, WINDOW, VOCAB, EOS = 512, 4, 8, 64, 128, 2, 97, 0


class DisagreementError(Exception):
    """Plan and executor disagree: the epoch is over."""


def check(holds: bool, sentence: str) -> None:
    if not holds:
        raise DisagreementError(sentence)


def likeliest(tokens: list[int]) -> int:
    return zlib.crc32(repr(tokens).encode()) % VOCAB


class Sequence:
    def __init__(self, new: Any) -> None:
        self.new, self.sampling = new, new.sampling
        self.tokens, self.computed, self.num_blocks = (
            list(new.token_ids),
            new.num_computed_tokens,
            len(new.block_ids),
        )
        self.ended_step: int | None = None
        self.drafted_step = 0
        self.ends = set(self.sampling.stop_token_ids) | (set() if self.sampling.ignore_eos else {EOS})

    def next_token(self) -> int:
        sampling, output_index = self.sampling, len(self.tokens) - self.new.num_prompt_tokens
        first = likeliest(self.tokens)
        held_back = self.ends if output_index < sampling.min_tokens else set()
        ids = [(first + i) % VOCAB for i in range(VOCAB) if (first + i) % VOCAB not in held_back]
        if sampling.temperature == 0:
            return ids[0]
        weights = [math.exp(-i / sampling.temperature) for i in range(len(ids))]
        kept = self.kept(weights)
        return self.drawn(ids[: len(kept)], kept, output_index)

    def kept(self, weights: list[float]) -> list[float]:
        """What top_k, top_p and min_p leave of the tokens' weights, the likeliest first."""
        sampling = self.sampling
        weights = weights[: sampling.top_k] if sampling.top_k > 0 else weights
        enough = sum(weights) * (sampling.top_p if sampling.HasField("top_p") else 1.0)
        reached = itertools.accumulate(weights)
        weights = [w for w, so_far in zip(weights, reached, strict=True) if so_far - w < enough]
        return [w for w in weights if w >= sampling.min_p]  # the first weighs 1

    def drawn(self, ids: list[int], weights: list[float], output_index: int) -> int:
        return random.Random(f"{self.sampling.seed} {output_index}").choices(ids, weights)[0]

    def most_drafts(self) -> int:
        """One less than it may still say."""
        return min(self.new.num_prompt_tokens + self.sampling.max_tokens, MAX_LEN) - len(self.tokens) - 1

    def end(self, token: int) -> tuple[Any, int | None] | None:
        """Why it ends with this token, the newest, and the one that was matched."""
        if token in self.ends:
            return common_pb2.FINISH_REASON_STOP, token
        num_output = len(self.tokens) - self.new.num_prompt_tokens
        is_long = num_output >= self.sampling.max_tokens or len(self.tokens) >= MAX_LEN
        return (common_pb2.FINISH_REASON_LENGTH, None) if is_long else None


def fault_of(new: Any) -> str:
    """What is wrong with one request, and no reason to end the epoch; empty when nothing is."""
    if max(new.token_ids) >= VOCAB:
        return "a token id is outside the vocabulary"
    if len(new.token_ids) >= MAX_LEN:
        return f"it has no room within {MAX_LEN} tokens"
    return "an option is not served here" if unserved(new.sampling) else ""


def unserved(sampling: Any) -> bool:
    """Whether it asks for more than every executor serves."""
    return bool(
        sampling.HasField("logprobs")
        or sampling.HasField("prompt_logprobs")
        or (sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1)
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.banned_token_ids
        or sampling.WhichOneof("constraint")
    )


class Epoch:
    """One lifetime of the state: a plan in, a result out."""

    def __init__(self) -> None:
        self.number = random.getrandbits(63) + 1
        self.sequences: dict[int, Sequence] = {}
        self.used: set[int] = set()
        self.kept: dict[int, tuple[Any, Any]] = {}
        self.last = self.acked = 0

    def answer(self, plan: Any) -> Any:
        if plan.step_id in self.kept:
            first, result = self.kept[plan.step_id]
            check(first == plan, f"step {plan.step_id} came again and differs")
            return result
        check(plan.step_id == self.last + 1, f"step {plan.step_id} came after step {self.last}")
        check(self.acked <= plan.acked_step_id <= self.last, "acked_step_id names no result")
        check(plan.step_id - plan.acked_step_id <= WINDOW, "too many plans are unanswered")
        self.last, self.acked = plan.step_id, plan.acked_step_id
        self.kept = {step: both for step, both in self.kept.items() if step > self.acked}
        result = self.run(plan)
        self.kept[plan.step_id] = (plan, result)
        return result

    def run(self, plan: Any) -> Any:
        result = executor_pb2.StepResult(epoch=self.number, step_id=plan.step_id)
        check(not (plan.block_copies or plan.zero_block_ids), "a reserved field is set")
        for seq_id, sequence in list(self.sequences.items()):
            forgotten = sequence.ended_step is not None and sequence.ended_step <= self.acked
            if forgotten or seq_id in plan.released_seq_ids:
                del self.sequences[seq_id]
        for new in plan.admitted:
            check(new.seq_id > 0, "seq_id 0 names nobody")
            check(new.seq_id not in self.used, f"seq_id {new.seq_id} was used before")
            check(1 <= new.num_prompt_tokens <= len(new.token_ids), "a prompt without or past the tokens")
            check(new.num_computed_tokens < len(new.token_ids), "nothing is left to compute")
            check(all(block < NUM_BLOCKS for block in new.block_ids), "no such block")
            self.used.add(new.seq_id)
            self.sequences[new.seq_id] = Sequence(new)
            if message := fault_of(new):
                self.sequences[new.seq_id].ended_step = plan.step_id
                result.errors.add(seq_id=new.seq_id, message=message, status_code=3)
        check(len(plan.grown_seq_ids) == len(plan.num_new_blocks), "ragged growth")
        check(sum(plan.num_new_blocks) == len(plan.new_block_ids), "ragged blocks")
        check(all(block < NUM_BLOCKS for block in plan.new_block_ids), "no such block")
        for seq_id, count in zip(plan.grown_seq_ids, plan.num_new_blocks, strict=True):
            check(seq_id in self.sequences, f"sequence {seq_id} grows and is unknown")
            self.sequences[seq_id].num_blocks += count
        check(len(plan.seq_ids) == len(plan.num_tokens), "ragged rows")
        check(len(plan.seq_ids) <= MAX_ROWS, "too many rows")
        check(len(set(plan.seq_ids)) == len(plan.seq_ids), "two rows of one sequence")
        check(sum(plan.num_tokens) <= MAX_TOKENS, "too many tokens")
        check(all(seq_id in self.sequences for seq_id in plan.seq_ids), "a row's sequence is unknown")
        positions_sum = sum(self.sequences[seq_id].computed for seq_id in plan.seq_ids)
        check(positions_sum == plan.positions_sum, f"positions_sum is {positions_sum} here")
        drafts = {entry.seq_id: list(entry.token_ids) for entry in plan.draft_tokens}
        check(len(drafts) == len(plan.draft_tokens), "two entries of draft tokens of one sequence")
        check(set(drafts) <= set(plan.seq_ids), "draft tokens without a row")
        check(all(drafts.values()), "an entry without draft tokens")
        drafted = itertools.chain(*drafts.values())
        check(all(token < VOCAB for token in drafted), "a draft token outside the vocabulary")
        for seq_id, num_tokens in zip(plan.seq_ids, plan.num_tokens, strict=True):
            self.run_row(result, self.sequences[seq_id], num_tokens, drafts.get(seq_id, []))
        return result

    def run_row(self, result: Any, sequence: Sequence, num_tokens: int, draft: list[int]) -> None:
        end, known = sequence.computed + num_tokens, len(sequence.tokens)
        check(sequence.drafted_step <= self.acked, "a row behind draft tokens that are not acknowledged")
        if sequence.ended_step is not None:
            sequence.computed = end
            return  # a ghost: it counts in positions_sum and reports nothing
        check(num_tokens >= 1, "a row of nothing")
        check(end <= known + len(draft), "a row past the known tokens")
        check(end <= sequence.num_blocks * BLOCK_SIZE, "a row past its blocks")
        check(not draft or end == known + len(draft), "a row that does not reach its draft tokens")
        check(len(draft) <= max(0, sequence.most_drafts()), "more draft tokens than may come")
        sequence.drafted_step = result.step_id if draft else 0
        sequence.computed = min(end, known)
        result.seq_ids.append(sequence.new.seq_id)
        before = len(result.token_ids)
        if end >= known:
            self.speak(result, sequence, draft)
        result.num_sampled.append(len(result.token_ids) - before)

    def speak(self, result: Any, sequence: Sequence, draft: list[int]) -> None:
        """One token, and one behind each draft token that was right."""
        for guess in (*draft, None):
            token, sequence.computed = sequence.next_token(), len(sequence.tokens)
            sequence.tokens.append(token)
            result.token_ids.append(token)
            if (end := sequence.end(token)) is not None:
                sequence.ended_step = result.step_id
                result.finished.add(seq_id=sequence.new.seq_id, reason=end[0], matched_token_id=end[1])
            if end is not None or token != guess:
                return


class ToyExecutor(executor_pb2_grpc.ExecutorServicer):
    """Who holds it, and which stream is the newest. A stream ends when its future is given a status."""

    def __init__(self) -> None:
        self.instance_id = f"toy-{random.getrandbits(64):x}"
        self.holder, self.term = "", 0
        self.epoch: Epoch | None = None
        self.past: dict[int, str] = {}
        self.streams: dict[int, asyncio.Future[grpc.StatusCode]] = {}
        self.next_stream, self.current = 1, 0

    def end_streams(self, status: grpc.StatusCode, before: int) -> None:
        for number, end in self.streams.items():
            if number < before and not end.done():
                end.set_result(status)

    async def abort(self, context: Any, status: grpc.StatusCode) -> None:
        if status is grpc.StatusCode.PERMISSION_DENIED:
            context.set_trailing_metadata(
                (("chairlift-scheduler-id", quote(self.holder)), ("chairlift-term", str(self.term)))
            )
        await context.abort(status, f"toy executor: {status.name}, held by {self.holder} at {self.term}")

    async def Open(self, request: Any, context: Any) -> Any:  # noqa: N802 - named by the contract
        live = any(not end.done() for end in self.streams.values())
        if self.holder and request.scheduler_id != self.holder:
            refused = live if request.term == 0 else request.term <= self.term
        else:
            refused = 0 < request.term < self.term
        if refused:
            await self.abort(context, grpc.StatusCode.PERMISSION_DENIED)
        if self.epoch is not None:
            self.past[self.epoch.number] = self.holder
        fenced = self.holder != request.scheduler_id
        self.holder, self.term = request.scheduler_id, request.term or self.term + 1
        self.epoch = Epoch()
        status = grpc.StatusCode.PERMISSION_DENIED if fenced else grpc.StatusCode.FAILED_PRECONDITION
        self.end_streams(status, before=self.next_stream)
        return executor_pb2.OpenResponse(
            epoch=self.epoch.number, instance_id=self.instance_id, term=self.term, protocol_revision=1,
            num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_window=WINDOW, max_num_seqs=MAX_ROWS,
            max_num_batched_tokens=MAX_TOKENS, max_seq_len=MAX_LEN, row_invariant=True, vocab_size=VOCAB,
            eos_token_ids=[EOS], features=["draft_tokens"], dtype="none",
            device="toy",
        )  # fmt: skip

    async def Execute(self, _: Any, context: Any) -> None:  # noqa: N802 - named by the contract
        number, self.next_stream = self.next_stream, self.next_stream + 1
        end = self.streams[number] = asyncio.get_running_loop().create_future()
        try:
            while True:
                read = asyncio.ensure_future(context.read())
                await asyncio.wait([read, end], return_when=asyncio.FIRST_COMPLETED)
                if end.done():
                    read.cancel()
                    await self.abort(context, end.result())
                if (plan := read.result()) is grpc.aio.EOF:
                    return
                if self.epoch is None or plan.epoch != self.epoch.number:
                    fenced = self.past.get(plan.epoch, self.holder) != self.holder
                    status = (
                        grpc.StatusCode.PERMISSION_DENIED if fenced else grpc.StatusCode.FAILED_PRECONDITION
                    )
                    await self.abort(context, status)
                self.end_streams(grpc.StatusCode.ABORTED, before=number)
                try:
                    result = self.epoch.answer(plan)
                except DisagreementError as error:
                    self.past[self.epoch.number], self.epoch = self.holder, None
                    await context.abort(grpc.StatusCode.DATA_LOSS, str(error))
                await context.write(result)
        finally:
            del self.streams[number]


async def main(address: str) -> None:
    server = grpc.aio.server()
    executor_pb2_grpc.add_ExecutorServicer_to_server(ToyExecutor(), server)
    healthy = health.aio.HealthServicer()
    for name in ("", "chairlift.v1.Executor"):
        await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    server.add_insecure_port(address)
    await server.start()
    print(f"listening on {address}", flush=True)  # noqa: T201 - whoever started it waits for this line
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

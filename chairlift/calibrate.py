"""`chairlift calibrate ADDRESS`: measures an executor's steps and writes prices that `--step-times` reads.

It takes the executor over, so run it on one that nobody uses. Synthetic sequences of several widths and
contexts are computed, prompts in chunks and then decoding, with two plans under way where the executor takes
two; what counts is the time from one result to the next.

`--record FILE` takes the steps that a scheduler recorded in its place: under the load they had, with all else
that ran on the machine, and the way to the executor and back.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from chairlift.about import about
from chairlift.flag_files import to_write
from chairlift.lab.fit import Fit, FitError, Measured, fit
from chairlift.lab.replay import DifferentError, UnreadableError, replay_file
from chairlift.lab.setups import SIZES, flags_of
from chairlift.lab.what_if import fitted
from chairlift.parser import Parser
from chairlift.step_driver import Epoch, ExecutorDriver, Failure, Stream, ended_by
from protos.v1 import common_pb2, executor_pb2
from rpc import tls, unconnected
from rpc.address import Address, AddressError
from rpc.channel import connect
from rpc.errors import StartError

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (16, 128, 512, 1536)
CHUNKS = (0, 16, 64, 256)  # tokens of a prompt beside those who decode
NUM_DECODE_STEPS = 12
MAX_TOKENS = 4096  # of all sequences of one shape: they are computed, which takes its time
_TIMEOUT_SECONDS = 120.0
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_NEVER_ENDS = common_pb2.SamplingParams(temperature=0, ignore_eos=True, max_tokens=2**31 - 1)

Rows = dict[int, int]


@dataclass(frozen=True, slots=True)
class Shape:
    """Steps of so many sequences that decode at this context, and a chunk of another one's prompt."""

    num_seqs: int
    context: int
    chunk: int = 0

    @property
    def lengths(self) -> list[int]:
        """Prompts to compute."""
        companion = [self.chunk * NUM_DECODE_STEPS] if self.chunk else []
        return [self.context] * self.num_seqs + companion

    def fits(self, capacity: executor_pb2.OpenResponse) -> bool:
        """Whether the executor can take it, and it does not take for ever."""
        lengths = [length + NUM_DECODE_STEPS + 1 for length in self.lengths]
        return (
            len(lengths) <= capacity.max_num_seqs
            and self.num_seqs + self.chunk <= capacity.max_num_batched_tokens
            and max(lengths) <= capacity.max_seq_len
            and sum(-(-length // capacity.block_size) for length in lengths) <= capacity.num_blocks
            and sum(self.lengths) <= MAX_TOKENS
        )


def shapes(capacity: executor_pb2.OpenResponse) -> list[Shape]:
    """What is measured on an executor of this capacity."""
    every = [Shape(width, context) for context in CONTEXTS for width in WIDTHS]
    every += [Shape(width, CONTEXTS[1], chunk) for chunk in CHUNKS[1:] for width in (1, 8)]
    return [shape for shape in every if shape.fits(capacity)]


class Bench:
    """One executor and one stream: gives it plans and notes how long they took."""

    def __init__(self, epoch: Epoch, stream: Stream) -> None:
        self.measured: list[Measured] = []
        self._epoch = epoch
        self._stream = stream
        self._rng = random.Random(0)  # noqa: S311 - ids that mean nothing
        self._computed: dict[int, int] = {}  # tokens of each sequence

    async def measure(self, shape: Shape) -> None:
        """Computes the prompts of a shape, then its steps, and forgets all of it.

        Of a shape's alike steps the median counts, so that a disturbance does not.
        """
        admitted = self._admitted(shape.lengths)
        decoding = [new.seq_id for new in admitted[: shape.num_seqs]]
        chunks = {new.seq_id: shape.chunk for new in admitted[shape.num_seqs :]}
        prompts = self._prompts({new.seq_id: len(new.token_ids) for new in admitted[: shape.num_seqs]})
        self.measured += await self._run(prompts, admitted)
        steps = [dict.fromkeys(decoding, 1) | chunks for _ in range(NUM_DECODE_STEPS)]
        timed = sorted(await self._run(steps, []), key=lambda step: step.microseconds)
        self.measured.append(timed[len(timed) // 2])
        await self._stream.step(self._epoch.plan(release=[new.seq_id for new in admitted]))

    def _admitted(self, lengths: list[int]) -> list[executor_pb2.NewSequence]:
        """Sequences of random ids, in blocks from the first on: those of the shape before are free again."""
        capacity, first = self._epoch.capacity, 0
        admitted = []
        for length in lengths:
            count = -(-(length + NUM_DECODE_STEPS + 1) // capacity.block_size)
            ids = [self._rng.randrange(capacity.vocab_size) for _ in range(length)]
            blocks = range(first, first + count)
            admitted.append(self._epoch.new(ids, _NEVER_ENDS, block_ids=blocks))
            first += count
        self._computed = {new.seq_id: 0 for new in admitted}
        return admitted

    def _prompts(self, left: dict[int, int]) -> list[Rows]:
        """Steps that compute these prompts, each as large as the executor takes."""
        steps: list[Rows] = []
        while left:
            budget, rows = self._epoch.capacity.max_num_batched_tokens, {}
            for seq_id in list(left):
                count = min(left[seq_id], budget)
                if not count:
                    break
                rows[seq_id] = count
                budget -= count
                left[seq_id] -= count
                if not left[seq_id]:
                    del left[seq_id]
            steps.append(rows)
        return steps

    async def _run(self, steps: list[Rows], admitted: list[executor_pb2.NewSequence]) -> list[Measured]:
        """Sends steps as the window allows; how long each took since it could begin."""
        window = max(1, min(2, self._epoch.capacity.max_window))
        sent_at: list[float] = []
        measured: list[Measured] = []
        last = 0.0
        for index in range(len(steps)):
            while len(sent_at) < min(len(steps), index + window):
                rows = steps[len(sent_at)]
                sent_at.append(time.perf_counter())
                await self._stream.send(self._epoch.plan(rows, admit=() if len(sent_at) > 1 else admitted))
            result = await self._stream.result()
            if result.errors:
                raise Failure(f"a sequence cannot be computed: {result.errors[0].message}")
            now = time.perf_counter()
            measured.append(self._measured(steps[index], now - max(last, sent_at[index])))
            last = now
        return measured

    def _measured(self, rows: Rows, seconds: float) -> Measured:
        for seq_id, count in rows.items():
            self._computed[seq_id] += count
        context = sum(self._computed[seq_id] for seq_id in rows)
        return Measured(sum(rows.values()), len(rows), context, 1e6 * seconds)


async def calibrate(
    address: str, *, certificates: tls.Tls | None = None, tell: Callable[[str], None]
) -> tuple[Fit, executor_pb2.OpenResponse]:
    """Prices of the executor at `address`, and its capacity. Raises Failure, FitError, AddressError."""
    channel = connect(
        Address.parse(address, field="ADDRESS"), max_message_bytes=_MAX_MESSAGE_BYTES, tls=certificates
    )
    async with channel:
        try:
            epoch = await ExecutorDriver(channel, timeout_seconds=_TIMEOUT_SECONDS).open("calibrate")
        except grpc.aio.AioRpcError as error:
            why = unconnected.explained(error.details() or "", certificates) or ended_by(error)
            raise Failure(f"the executor at {address} cannot be opened ({why})") from error
        async with epoch.stream() as stream:
            wanted = shapes(epoch.capacity)
            if not wanted:
                raise Failure("the executor is too small for any of the shapes that are measured")
            await Bench(epoch, stream).measure(wanted[-1])  # warm
            bench = Bench(epoch, stream)
            for number, shape in enumerate(wanted, start=1):
                tell(f"{number} of {len(wanted)}: {shape.num_seqs} at {shape.context} tokens")
                await bench.measure(shape)
            return fit(bench.measured), epoch.capacity


def by_record(path: Path, *, may_be_cut: bool = False) -> tuple[Fit, list[str]]:
    """Prices of the steps in a record, and flags of `simulate` for its first executor as it was used.

    Raises UnreadableError, DifferentError, FitError, OSError.
    """
    report = replay_file(path, may_be_cut=may_be_cut)
    if not report.fleet:
        raise FitError("no executor was there when it was recorded")
    return fitted(report), flags_of(report)


def main(argv: list[str]) -> int:
    """Measures, prints the errors of the fit, writes the prices; returns the exit code."""
    parser = Parser(
        prog="chairlift calibrate",
        description=about(__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    measured = parser.add_mutually_exclusive_group(required=True)
    measured.add_argument(
        "address", nargs="?", metavar="ADDRESS", help="HOST:PORT or unix:PATH of the executor"
    )
    measured.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="what a scheduler wrote with its --record, in place of ADDRESS",
    )
    parser.add_argument(
        "--cut", action="store_true", help="take a record whose scheduler was killed as far as it is whole"
    )
    parser.add_argument("--out", type=to_write, metavar="FILE", help="where the prices go; default: shown")
    tls.add_flags(parser)
    options = parser.parse_args(argv)
    if options.record is not None and (unused := tls.given_flags(parser, options)):
        parser.error(f"{', '.join(unused)} with --record: a file is read, nobody is called; leave it out")

    if options.cut and options.record is None:
        parser.error("--cut without --record: it is about a file; leave it out")

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        if options.record is not None:
            found, flags = by_record(options.record, may_be_cut=options.cut)
        else:
            found, capacity = asyncio.run(
                calibrate(options.address, certificates=tls.from_flags(options), tell=tell)
            )
            flags = [f"--{name.replace('_', '-')} {getattr(capacity, name)}" for name in SIZES]
        text = json.dumps(found.as_json(), indent=2)
        if options.out is not None:
            options.out.write_text(text + "\n")
    except (AddressError, StartError, Failure, FitError, UnreadableError, DifferentError, OSError) as error:
        print(f"chairlift calibrate: {error}", file=sys.stderr)
        return 2
    if options.out is None:
        print(text)
    tell(found.sentence)
    tell(f"simulate it with --step-times {options.out or 'FILE'} {' '.join(flags)}")
    return 0

"""The ranks of one model as a group of processes, on torch.distributed.

There are two kinds of messages, each in a group of its own. Tensors of a step are sent by NCCL between GPUs
and by gloo between CPUs. What the first rank tells the others (the next step, that it is still there, the
end) is sent by gloo, from host memory: the others wait for it without touching a device.

A group that waits for a rank which is gone, or hangs, must not wait for ever. A process that ends closes its
connections, which ends every wait for it at once; one that hangs, or whose machine is gone, is waited for as
long as `PATIENCE`. Between steps, the first rank tells the others every few seconds that it is there. After
any failure the group is over, because no rank knows which message the others have reached.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final

import numpy as np
import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from executor.inputs import StepInputs
from executor.model.checkpoint import Checkpoint
from executor.model.config import ModelConfig
from executor.model.errors import ModelError
from executor.operations.base import Operations
from executor.parallel.errors import RankLostError
from executor.parallel.messages import packed, unpacked
from executor.parallel.operations import ParallelOperations
from executor.parallel.place import FILE_SCHEME, Place
from executor.parallel.shard import Shard

PATIENCE: Final = timedelta(seconds=60)
"""How long a rank is waited for within a step, and the first rank's next word between steps."""
LOADING_PATIENCE: Final = timedelta(minutes=30)
"""How long a rank is waited for that may still be reading its weights."""
PULSE_SECONDS: Final = 10.0
FRAME_BYTES: Final = 8192
"""A step of a few dozen sequences fits: it takes one message, a larger one a second."""

_STEP, _PULSE, _END = range(3)

log = structlog.get_logger()


class Group:
    """`Ranks` on torch.distributed, one of them this process; also what their operations exchange.

    Use it from the device's thread, or after that has ended.
    """

    def __init__(self, place: Place, device: str) -> None:
        self.rank = place.rank
        self.size = place.size
        self.num_sharers = place.local_size if device == "cpu" else 1
        self.is_ordered = device == "cpu"
        self._place = place
        self._device = device
        self._ending = threading.Event()
        self._turn = threading.Lock()
        """Held by the first rank's step, or by its pulse."""
        self._failure: RankLostError | None = None
        self._words: Any = None
        self._tensors: Any = None

    # --- once per model -------------------------------------------------------------------------------

    def shard(self, checkpoint: Checkpoint) -> Checkpoint:
        """Its heads, its part of the MLP and of the vocabulary."""
        return self._shard_of(checkpoint.config).of(checkpoint)

    def meet(self) -> None:
        """Connect all ranks to each other."""
        if self._words is not None:
            return
        if self._place.meeting.startswith(FILE_SCHEME):
            # All on this machine: nothing of ours is to be reached from outside.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if self._device == "cuda":
            self._take_device()
        with self._within("meeting"):
            dist.init_process_group(
                "gloo",
                init_method=self._place.meeting,
                rank=self.rank,
                world_size=self.size,
                timeout=LOADING_PATIENCE,
            )
            self._words = dist.new_group(backend="gloo", timeout=PATIENCE)
            self._tensors = dist.new_group(
                backend="nccl" if self._device == "cuda" else "gloo", timeout=PATIENCE
            )
        log.info("ranks_met", rank=self.rank, size=self.size)

    def agree(self, what: str, value: str) -> None:
        """Everybody sees all values, so that all ranks refuse or none does."""
        values: list[str] = [""] * self.size
        with self._within("agreeing"):
            dist.all_gather_object(values, value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise ModelError(
                    f"the ranks of one model must have the same {what}: rank 0 has {values[0]}, "
                    f"rank {rank} has {other}."
                )

    def least(self, number: int) -> int:
        """By an exchange."""
        found = torch.tensor(number)
        with self._within("agreeing"):
            dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def joined(self, operations: Operations, whole: Checkpoint) -> Operations:
        """With the vocabularies of all ranks."""
        shard = self._shard_of(whole.config)
        spans = [shard.vocabulary_of(rank) for rank in range(self.size)]
        vocabularies = [range(span.start, span.stop) for span in spans]
        return ParallelOperations(operations, self, rank=self.rank, vocabularies=vocabularies)

    def _shard_of(self, config: ModelConfig) -> Shard:
        return Shard(config, self.rank, self.size)

    def _take_device(self) -> None:
        """This thread's CUDA device is the one of this rank."""
        count = torch.cuda.device_count()
        if self._place.local_size > count:
            raise ModelError(
                f"{self._place.local_size} ranks on this machine need a GPU each, and torch finds {count}."
            )
        torch.cuda.set_device(self._place.local_rank)

    # --- tensors ----------------------------------------------------------------------------------------

    def add(self, part: Tensor) -> None:
        """NCCL adds as it likes, in the tensor's type. On CPUs the ranks' parts are added in their order."""
        if self._device == "cuda":
            dist.all_reduce(part, group=self._tensors)
            return
        parts = torch.empty((self.size, *part.shape), dtype=part.dtype)
        dist.all_gather(list(parts), part.contiguous(), group=self._tensors)
        part.copy_(total_of(parts))

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """Sent in the widest part's width."""
        num_rows, most = part.shape[0], max(widths)
        if num_rows == 0:
            return part.new_empty(0, sum(widths)) if self.rank == 0 else part
        sent = part.new_zeros(num_rows, most)
        sent[:, : part.shape[1]] = part
        if self.rank > 0:
            dist.gather(sent, dst=0, group=self._tensors)
            return part
        parts = [torch.empty_like(sent) for _ in widths]
        dist.gather(sent, parts, dst=0, group=self._tensors)
        return torch.cat([each[:, :width] for each, width in zip(parts, widths, strict=True)], dim=1)

    def share(self, token_ids: Tensor) -> Tensor:
        """On the device: no host sees them."""
        dist.broadcast(token_ids, src=0, group=self._tensors)
        return token_ids

    # --- steps ------------------------------------------------------------------------------------------

    @contextmanager
    def leading(self, inputs: StepInputs) -> Iterator[None]:
        """Tell the others, then let the caller compute."""
        with self._turn, self._within("a step"):
            self._say(_STEP, packed(inputs))
            yield

    def begin_pulse(self, on_lost: Callable[[RankLostError], object]) -> None:
        """Tell the others between steps that the first rank is there, from now on.

        `on_lost` is told, in another thread, when they are found to be gone.
        """
        threading.Thread(target=self._pulse, args=(on_lost,), name="pulse", daemon=True).start()

    def steps(self) -> Iterator[StepInputs]:
        """Until the first rank ends."""
        while True:
            with self._within("waiting for the first rank's word"):
                word, message = self._hear()
            if word == _END:
                return
            if word == _STEP:
                yield unpacked(message)

    def end(self) -> None:
        """Say so, where the group still is one, and take its connections down."""
        self._ending.set()
        if self._words is None:
            return
        with self._turn:
            if self.rank == 0:
                with suppress(RankLostError), self._within("taking leave"):
                    self._say(_END, b"")
            # Gloo's threads must not be left to the end of the process, which they abort; NCCL would wait for
            # ranks that are gone.
            if self._failure is None or self._device == "cpu":
                with suppress(RuntimeError):
                    dist.destroy_process_group()

    def _pulse(self, on_lost: Callable[[RankLostError], object]) -> None:
        while not self._ending.wait(PULSE_SECONDS):
            try:
                with self._turn, self._within("telling that the first rank is there"):
                    self._say(_PULSE, b"")
            except RankLostError as lost:
                on_lost(lost)
                return

    def _say(self, word: int, message: bytes) -> None:
        """To all others: `[word | length | message ...]` in frames, the first of a fixed size."""
        whole = np.array([word, len(message)], dtype=np.int64).tobytes() + message
        self._broadcast(_bytes_tensor(whole[:FRAME_BYTES].ljust(FRAME_BYTES, b"\0")))
        if len(whole) > FRAME_BYTES:
            self._broadcast(_bytes_tensor(whole[FRAME_BYTES:]))

    def _hear(self) -> tuple[int, bytes]:
        frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        self._broadcast(frame)
        first = frame.numpy().tobytes()
        head = np.frombuffer(first, np.int64, 2)
        word, length = head.tolist()
        body = first[head.nbytes : head.nbytes + length]
        if len(body) < length:
            rest = torch.empty(length - len(body), dtype=torch.uint8)
            self._broadcast(rest)
            body += rest.numpy().tobytes()
        return word, body

    def _broadcast(self, frame: Tensor) -> None:
        dist.broadcast(frame, src=0, group=self._words)

    @contextmanager
    def _within(self, doing: str) -> Iterator[None]:
        """After an exception in here, everything that needs the others raises: the group is over."""
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except Exception as error:
            self._failure = RankLostError(
                f"the {self.size} ranks reach each other no longer: on rank {self.rank}, {doing} failed "
                f"({type(error).__name__}: {str(error).partition('. This is typically')[0]})"
            )
            raise self._failure from error


def total_of(parts: Tensor) -> Tensor:
    """The float32 sum of the ranks' `parts` `[size, ...]`, in their order for each number alike."""
    total = parts[0].float()
    for other in parts[1:]:
        total += other
    return total


def _bytes_tensor(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)

"""What a GPU does before its executor is ready: it finds how many KV blocks fit, builds kernels, captures.

    weights loaded -> num_blocks: the largest step, tried out over a cache that is freed afterwards
                   -> pipeline:   a step of each form, then decode steps captured, over the real cache

If there are several ranks, all do the same, in the same order, over their shards: they exchange data in these
steps as in any other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
import torch

from executor import warm_up
from executor.accelerator import Accelerator
from executor.captured import CapturedDecode, captured_sizes
from executor.device_memory import (
    bytes_of_captures,
    largest_step,
    num_blocks_that_fit,
    num_profile_blocks,
)
from executor.kv_cache import KVCache, bytes_per_block, useful_num_blocks
from executor.model.config import ModelConfig
from executor.model.decoder import Decoder
from executor.operations.plain import PlainOperations
from executor.parallel.ranks import Ranks
from executor.pipeline import Pipeline

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LateStart:
    """A model whose weights are on the device, and what its steps will be like."""

    accelerator: Accelerator
    model: Decoder
    operations: PlainOperations
    """those of this rank's shard"""
    config: ModelConfig
    """the shard's"""
    ranks: Ranks
    vocab_size: int
    """the whole model's"""
    max_num_seqs: int
    cache_of: Callable[[int], KVCache]
    """a cache of so many blocks"""

    def num_blocks(self, num_tokens: int, memory_utilization: float) -> int:
        """Blocks that fit beside steps of up to `num_tokens`. Raises `ModelError` when none does."""
        config, block_size, max_num_seqs = self.config, self.operations.block_size, self.max_num_seqs
        largest = largest_step(
            max_num_seqs=max_num_seqs,
            num_tokens=num_tokens,
            max_seq_len=config.max_seq_len,
            block_size=block_size,
        )
        num_profiled = num_profile_blocks(num_tokens, config.max_seq_len, block_size)
        cache = self.cache_of(num_profiled)
        block_bytes = bytes_per_block(config, block_size, self.operations.attention.spec.dtype)

        def run() -> None:
            pipeline = self._pipeline(cache, captured=None, tells_others=False)
            if self.ranks.rank == 0:
                pipeline.collect(pipeline.launch(largest, lambda: None))
            else:
                pipeline.follow(largest.inputs)

        return num_blocks_that_fit(
            self.accelerator,
            run,
            lambda: self._bytes_of_captures(cache),
            profile_bytes=(num_profiled + 1) * block_bytes,
            block_bytes=block_bytes,
            block_size=block_size,
            num_tokens=num_tokens,
            memory_utilization=memory_utilization,
            useful=useful_num_blocks(config, block_size=block_size, max_num_seqs=max_num_seqs),
        )

    @torch.inference_mode()
    def pipeline(self, kv_cache: KVCache) -> Pipeline:
        """The model's steps, those of decode rows captured where the attention back end allows it."""
        for inputs in warm_up.steps(
            num_kv_heads=self.config.num_kv_heads,
            max_num_seqs=self.max_num_seqs,
            trash_block_id=kv_cache.trash_block_id,
            block_size=kv_cache.block_size,
        ):
            self.model.logits(inputs, kv_cache)
        if self.ranks.rank == 0:
            self.operations.filter_rows(*warm_up.filtered_row(self.vocab_size, self.accelerator.device))
        captured = None
        if self.operations.attention.can_be_captured:
            sizes = captured_sizes(self.max_num_seqs)
            captured = self._captured(kv_cache, sizes)
            log.info("decode_captured", sizes=sizes)
        return self._pipeline(kv_cache, captured=captured, tells_others=True)

    def _pipeline(self, cache: KVCache, *, captured: CapturedDecode | None, tells_others: bool) -> Pipeline:
        return Pipeline(
            self.accelerator,
            self.model,
            self.operations,
            cache,
            vocab_size=self.vocab_size,
            captured=captured,
            ranks=self.ranks,
            tells_others=tells_others,
        )

    @torch.inference_mode()
    def _bytes_of_captures(self, cache: KVCache) -> int:
        if not self.operations.attention.can_be_captured:
            return 0
        return bytes_of_captures(
            self.accelerator, lambda sizes: self._captured(cache, sizes), captured_sizes(self.max_num_seqs)
        )

    def _captured(self, cache: KVCache, sizes: Sequence[int]) -> CapturedDecode:
        return CapturedDecode(
            self.accelerator,
            self.model,
            self.operations,
            cache,
            sizes=sizes,
            max_seq_len=self.config.max_seq_len,
        )

"""A loaded model, its KV cache and the sampler, driven one step at a time by one thread.

Knows no plan and no sequence: arrays come in (`executor.inputs`), chosen tokens go out.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import structlog
import torch

from executor import logprobs, sampler, selection, self_test
from executor.constraints import Constraint, Constraints, Matcher
from executor.device import Fingerprints, StepOutput
from executor.device_memory import check_weights_fit
from executor.inputs import Scored, StepInputs, build_inputs
from executor.kv_cache import (
    KVCache,
    begun_blocks,
    bytes_per_block,
    default_num_blocks,
)
from executor.late_start import LateStart
from executor.model import ModelError
from executor.model.checkpoint import Checkpoint, tokenizer_fingerprint
from executor.model.config import ModelConfig
from executor.model.decoder import Decoder, Hidden
from executor.model.opening import open_checkpoint
from executor.model.quantized import Quantization
from executor.model.weights import load_weights, weight_bytes
from executor.operations.base import Operations
from executor.operations.plain import PlainOperations
from executor.parallel.ranks import Alone, Ranks
from executor.pipeline import Pipeline
from executor.plan import DRAFT_TOKENS, PromptLogprobs, SamplingParams
from executor.rows import Row, Sampled, SampleRow

FEATURES: Final = ("logprobs", "prompt_logprobs", "penalties", "logit_bias", "token_lists")

log = structlog.get_logger()


class ModelRunner:
    """A loaded model. Use it from one thread."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        model: Decoder,
        model_fingerprint: str,
        numerics: str,
        operations: Operations,
        kv_cache: KVCache,
        dtype: str,
        device: torch.device,
        ranks: Ranks,
        pipeline: Pipeline | None,
        clears_blocks: bool,
    ) -> None:
        self._config: ModelConfig = checkpoint.config
        self._ranks = ranks
        self._eos_token_ids = checkpoint.eos_token_ids
        self._model = model
        self._choose = operations.choose
        self._kv_cache = kv_cache
        self._pipeline = pipeline
        self._clears_blocks = clears_blocks
        self._dtype = dtype
        self._device = device
        self._fingerprints = Fingerprints(
            model=model_fingerprint,
            tokenizer=tokenizer_fingerprint(checkpoint.token_texts),
            numerics=numerics,
        )
        # Only the first rank samples.
        self._constraints = constraints_of(checkpoint) if ranks.rank == 0 else None
        self._row_invariant = operations.row_invariant and self._is_row_invariant()

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        dtype: str,
        device: str,
        num_blocks: int | None,
        block_size: int | None,
        max_num_seqs: int,
        quantization: str = "none",
        token_budget: Callable[[str], int] = lambda _: 2048,
        attention: str | None = None,
        memory_utilization: float = 0.9,
        ranks: Ranks | None = None,
    ) -> "ModelRunner":
        """Load a Hugging Face folder or a GGUF file, or this rank's shard of it; `ranks` are met here.

        `dtype` is float32 or bfloat16, `device` cpu, cuda or auto, `quantization` the value of a
        `Quantization`. `num_blocks` of the KV cache (None: what fits into memory, on a GPU into the share
        `memory_utilization` of it, and no more than `max_num_seqs` whole sequences need), of `block_size`
        tokens each (None: what suits the attention back end, which is the one named `attention`, or the
        first that can serve). `token_budget` tells the most tokens in a step on a kind of device. Raises
        `ModelError`.
        """
        started = time.monotonic()
        torch_device = selection.checked_device(device)
        torch_dtype = selection.checked_dtype(dtype, torch_device.type)
        accelerator = selection.accelerator_of(torch_device)
        ranks = Alone() if ranks is None else ranks
        checkpoint = open_checkpoint(path)
        shard = ranks.shard(checkpoint)
        ranks.meet()
        config = shard.config

        form = Quantization(quantization)
        own = selection.operations_for(
            config,
            torch_device,
            torch_dtype,
            block_size=block_size,
            attention=attention,
            quantization=form,
        )
        operations = ranks.joined(own, checkpoint)
        if accelerator is not None:
            check_weights_fit(accelerator, weight_bytes(config, torch_dtype))
        weights = load_weights(shard, torch_dtype, torch_device, operations, form)
        # Now, for whoever comes to the first step waits for the others no longer than in any step.
        numerics = selection.numerics(torch_device, dtype, operations, form)
        ranks.agree("numerics", numerics)
        ranks.agree("weights", weights.fingerprint)
        model = Decoder(config, weights, operations)
        block_size = operations.block_size

        def cache_of(num_blocks: int) -> KVCache:
            return KVCache(
                config,
                num_blocks=num_blocks,
                block_size=block_size,
                dtype=torch_dtype,
                device=torch_device,
            )

        late = None
        if accelerator is not None:
            assert isinstance(own, PlainOperations), "our own kernels are the CPU's"
            late = LateStart(
                accelerator, model, own, config, ranks, checkpoint.config.vocab_size, max_num_seqs, cache_of
            )
        if num_blocks is None and late is not None:
            num_blocks = late.num_blocks(token_budget(torch_device.type), memory_utilization)
        elif num_blocks is None:
            num_blocks = default_num_blocks(
                config,
                block_size=block_size,
                dtype=torch_dtype,
                max_num_seqs=max_num_seqs,
                num_sharers=ranks.num_sharers,
            )
        num_blocks = ranks.least(num_blocks)
        kv_cache = cache_of(num_blocks)
        pipeline = None if late is None else late.pipeline(kv_cache)
        log.info(
            "model_loaded",
            path=str(path),
            dtype=dtype,
            quantization=form.value,
            stored_as=sorted({tensor.dtype for tensor in checkpoint.tensors.values()}),
            device=torch_device.type,
            seconds=round(time.monotonic() - started, 2),
            weight_bytes=weights.num_bytes,
            num_blocks=num_blocks,
            block_size=block_size,
            kv_cache_bytes=(num_blocks + 1) * bytes_per_block(config, block_size, torch_dtype),
            max_seq_len=config.max_seq_len,
            eos_token_ids=checkpoint.eos_token_ids,
        )
        return cls(
            checkpoint,
            model=model,
            model_fingerprint=weights.fingerprint,
            numerics=numerics,
            operations=operations,
            kv_cache=kv_cache,
            dtype=dtype,
            device=torch_device,
            ranks=ranks,
            pipeline=pipeline,
            clears_blocks=isinstance(own, PlainOperations) and own.attention.needs_clean_tails,
        )

    @property
    def num_blocks(self) -> int:
        """KV blocks that plans may use."""
        return self._kv_cache.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._kv_cache.block_size

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._config.vocab_size

    @property
    def max_seq_len(self) -> int:
        """Longest sequence the model can take, prompt plus output, tokens."""
        return self._config.max_seq_len

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that any of the model's files calls an end token, sorted."""
        return self._eos_token_ids

    @property
    def fingerprints(self) -> Fingerprints:
        """What model, tokenizer and numerics are."""
        return self._fingerprints

    @property
    def dtype(self) -> str:
        """Number type of the computation."""
        return self._dtype

    @property
    def device(self) -> str:
        """Kind of device."""
        return self._device.type

    @property
    def features(self) -> tuple[str, ...]:
        """Names of optional abilities."""
        constraints = () if self._constraints is None else ("constraints",)
        # Where steps are launched ahead, nobody knows yet how many of a row's draft tokens were right.
        drafts = (DRAFT_TOKENS,) if self._pipeline is None else ()
        return (*FEATURES, *constraints, *drafts)

    @property
    def matcher_of(self) -> Callable[[Constraint, Sequence[int]], Matcher] | None:
        """What may follow output ids under a constraint; None when the vocabulary's texts are not known."""
        return None if self._constraints is None else self._constraints.matcher

    @property
    def pipeline(self) -> Pipeline | None:
        """The device as one that works while the host goes on; None for the CPU."""
        return self._pipeline

    @property
    def row_invariant(self) -> bool:
        """Whether a token's logits are bit-identical whatever the batch, the chunks and the cache."""
        return self._row_invariant

    @torch.inference_mode()
    def step(self, inputs: StepInputs, sample_rows: Sequence[SampleRow]) -> StepOutput:
        """Compute the rows of one step and choose a token for each of `sample_rows`.

        `sample_rows` belong to `inputs.logits_indices`, in that order. A row that cannot be sampled has its
        error in the result; it is no exception. Several ranks with a pipeline make no step but through it.
        """
        assert self._pipeline is None or self._ranks.size == 1, "the other ranks follow the pipeline"
        started = time.perf_counter_ns()
        self._kv_cache.used(int(inputs.slot_mapping.max()) // self.block_size)
        with self._ranks.leading(inputs):
            hidden = self._forward(inputs)
            scores = [self._score(hidden, scored) for scored in inputs.scored]
            logits = self._model.head(hidden)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        forwarded = time.perf_counter_ns()
        sampled = sampler.sample(logits, sample_rows, self._choose) if sample_rows else Sampled([], [], [])
        ended = time.perf_counter_ns()
        return StepOutput(
            sampled,
            [score for score in scores if score is not None],
            (forwarded - started) // 1000,
            (ended - forwarded) // 1000,
        )

    @torch.inference_mode()
    def follow(self) -> None:
        """Make the steps that the first rank leads, until it ends: all that it does but sampling."""
        for inputs in self._ranks.steps():
            if self._pipeline is not None:
                self._pipeline.follow(inputs)
                continue
            hidden = self._forward(inputs)
            for scored in inputs.scored:
                for indices in logprobs.slices(scored, self.vocab_size, self._device):
                    self._model.head(hidden, indices)
            self._model.head(hidden)

    def close(self) -> None:
        """Make no more steps; to be called before the ranks take leave of each other."""
        if self._pipeline is not None:
            self._pipeline.close()

    def _forward(self, inputs: StepInputs) -> Hidden:
        if self._clears_blocks:
            blocks = begun_blocks(inputs.slot_mapping, self.block_size)
            self._kv_cache.clear(torch.from_numpy(blocks).to(self._device))
        return self._model.forward(inputs, self._kv_cache)

    def _score(self, hidden: Hidden, scored: Scored) -> PromptLogprobs | None:
        def logits_at(indices: torch.Tensor) -> torch.Tensor:
            return self._model.head(hidden, indices.to(self._device))

        return logprobs.score(scored, logits_at, self.vocab_size)

    @torch.inference_mode()
    def logits(self, inputs: StepInputs) -> torch.Tensor:
        """Compute the rows of one step: float32 logits `[num_sampling_rows, vocab_size]`."""
        return self._model.logits(inputs, self._kv_cache)

    @torch.inference_mode()
    def _is_row_invariant(self) -> bool:
        """What the self-test finds, on a small cache of its own."""
        cache = self._kv_cache.another(self_test.num_blocks(self.block_size))
        invariant = self_test.is_row_invariant(
            lambda inputs: self._model.logits(inputs, cache),
            vocab_size=self.vocab_size,
            max_seq_len=self.max_seq_len,
            block_size=self.block_size,
        )
        if not invariant:
            log.warning("not_row_invariant", numerics=self._fingerprints.numerics)
        return invariant

    def work_ahead(self) -> bool:
        """Do a few milliseconds of what later steps would wait for; returns whether there was any."""
        return self._kv_cache.take_pages_ahead()

    def warm_up(self) -> None:
        """Make one real token, in the block that belongs to no sequence.

        Raises `ModelError` when the model's logits are not finite numbers.
        """
        blocks = np.array([self._kv_cache.trash_block_id], dtype=np.int32)
        batch = build_inputs(
            [Row(0, [0], 0, blocks, (SampleRow(SamplingParams(max_tokens=1), 0, ()),))], self.block_size
        )
        if self._pipeline is None:
            output = self.step(batch.inputs, batch.sample_rows)
        else:
            output = self._pipeline.collect(self._pipeline.launch(batch, lambda: None))
            self._pipeline.forget()
        error = output.sampled.errors[0]
        if error is not None:
            raise ModelError(f"the first token could not be made: {error}.")
        log.info("warmed_up", forward_us=output.forward_us, sample_us=output.sample_us)


def constraints_of(checkpoint: Checkpoint) -> Constraints | None:
    """What holds outputs to a form; None when it cannot be known what the tokens stand for, or none ends."""
    vocabulary = checkpoint.token_bytes
    num_tokens = 0 if vocabulary is None else min(len(vocabulary.tokens), checkpoint.config.vocab_size)
    eos_token_ids = [each for each in checkpoint.eos_token_ids if each < num_tokens]
    if vocabulary is None or not eos_token_ids:
        log.info("no_constraints", token_bytes_known=vocabulary is not None)
        return None
    return Constraints(
        vocabulary.tokens[:num_tokens],
        special_ids=sorted(each for each in vocabulary.special_ids if each < num_tokens),
        eos_token_ids=eos_token_ids,
        vocab_size=checkpoint.config.vocab_size,
    )

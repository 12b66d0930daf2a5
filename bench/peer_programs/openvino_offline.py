"""One workload through OpenVINO GenAI: `python openvino_offline.py MODEL.gguf WORKLOAD.json RESULT.json`.

Runs in the peer's own environment and imports nothing of ours. Continuous batching, bfloat16 for both the
arithmetic and the KV cache (left alone it takes int8 for the cache).
"""

import json
import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as genai


def main() -> None:
    """Loads, warms up, runs, writes."""
    model, workload_path, result_path = sys.argv[1:]
    with open(workload_path, encoding="utf-8") as file:
        requests = json.load(file)["requests"]
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 3
    scheduler.max_num_seqs = 256
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = True
    pipeline = genai.ContinuousBatchingPipeline(
        model,
        scheduler,
        "CPU",
        {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16", "INFERENCE_NUM_THREADS": 2},
    )

    def run(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        configs = []
        for length in lengths:
            config = genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = length
            config.ignore_eos = True
            config.do_sample = False
            configs.append(config)
        tensors = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        return [list(each.m_generation_ids[0]) for each in pipeline.generate(tensors, configs)]

    run([[7 + n] * 16 for n in range(4)], [8] * 4)
    prompts = [request["prompt"] for request in requests]
    lengths = [request["max_tokens"] for request in requests]
    began = time.monotonic()
    outputs = run(prompts, lengths)
    seconds = time.monotonic() - began
    with open(result_path, "w", encoding="utf-8") as file:
        json.dump({"seconds": seconds, "version": genai.get_version(), "tokens": outputs}, file)


if __name__ == "__main__":
    main()

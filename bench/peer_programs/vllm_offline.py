"""One workload through vLLM: `python vllm_offline.py MODEL_FOLDER WORKLOAD.json RESULT.json`.

Runs in the peer's own environment and imports nothing of ours. What it needs from outside (both cores bound,
no second process, tcmalloc and Intel's OpenMP preloaded) is in the environment that `bench.peers` gives it.
"""

import json
import sys
import time

import vllm


def main() -> None:
    """Loads, warms up, runs, writes."""
    model, workload_path, result_path = sys.argv[1:]
    with open(workload_path, encoding="utf-8") as file:
        requests = json.load(file)["requests"]
    engine = vllm.LLM(model=model, dtype="bfloat16", enable_prefix_caching=True, seed=0)

    def run(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        params = [vllm.SamplingParams(temperature=0, ignore_eos=True, max_tokens=each) for each in lengths]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(each.outputs[0].token_ids) for each in engine.generate(inputs, params, use_tqdm=False)]

    run([[7 + n] * 16 for n in range(4)], [8] * 4)
    prompts = [request["prompt"] for request in requests]
    lengths = [request["max_tokens"] for request in requests]
    began = time.monotonic()
    outputs = run(prompts, lengths)
    seconds = time.monotonic() - began
    with open(result_path, "w", encoding="utf-8") as file:
        json.dump({"seconds": seconds, "version": vllm.__version__, "tokens": outputs}, file)


if __name__ == "__main__":
    main()

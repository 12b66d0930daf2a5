"""A mixture of experts beside dense models of as many weights: seconds of a decode step by batch width.

    python -m bench.expert_steps [--dtype bfloat16] [--quantization int8] [--rounds 15]

Three models of random weights, which differ in their MLPs alone: 64 experts, of which a token has 8; one MLP
of as many weights as those 8; and one of as many as all 64. The fastest of several steps, models and widths
alternating: what else runs on the machine only adds. Takes 2 GB of the temporary folder at a time, and 8 GB
of memory.
"""

import argparse
import json
import logging
import math
import tempfile
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors.torch import save_file

from bench import machine_limit
from bench.cpu_steps import rows
from executor.model.config_json import from_config_json
from executor.model.weights import expected_shapes
from executor.runner import ModelRunner

EXPERTS, CHOSEN, SIZE = 64, 8, 384
SHAPE = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
MODELS: dict[str, dict[str, Any]] = {
    f"{EXPERTS} experts, {CHOSEN} for a token": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "intermediate_size": SIZE,
        "moe_intermediate_size": SIZE,
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "norm_topk_prob": True,
    },
    "dense, a token's weights": {
        "architectures": ["Qwen3ForCausalLM"],
        "intermediate_size": CHOSEN * SIZE,
    },
    "dense, all weights": {
        "architectures": ["Qwen3ForCausalLM"],
        "intermediate_size": EXPERTS * SIZE,
    },
}
WIDTHS = (1, 8, 64)
CONTEXT = 96


def write_random(folder: Path, config: dict[str, Any]) -> None:
    """A Hugging Face folder of the shape, its weights random and such that states keep their size."""
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in expected_shapes(from_config_json(config)).items():
        if len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            numbers = torch.randn(shape, generator=generator, dtype=torch.bfloat16)
            tensors[name] = numbers.div_(math.sqrt(shape[1]))
    save_file(tensors, folder / "model.safetensors")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    runners = {}
    for name, differs in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_random(Path(folder), SHAPE | differs)
            runners[name] = ModelRunner.load(
                Path(folder),
                dtype=options.dtype,
                quantization=options.quantization,
                device="cpu",
                num_blocks=500,
                block_size=16,
                max_num_seqs=64,
            )
    machine = machine_limit.measured(options.threads)
    print(
        f"limits: {machine.operations_per_second / 1e9:.0f} GF/s, {machine.bytes_per_second / 1e9:.1f} GB/s"
    )
    taken: dict[tuple[str, int], list[float]] = {}
    for _ in range(options.rounds):
        for width in WIDTHS:
            for name, runner in runners.items():
                output = runner.step(*rows(runner, width, 1, CONTEXT))
                taken.setdefault((name, width), []).append((output.forward_us + output.sample_us) / 1000)
    for name in runners:
        steps = ", ".join(f"{min(taken[name, width]):.1f} ms of {width}" for width in WIDTHS)
        print(f"{name:28} {steps}")


if __name__ == "__main__":
    main()

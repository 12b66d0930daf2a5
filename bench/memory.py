"""What an executor's memory goes to: resident bytes after each stage of its start, and their peak.

    python -m bench.memory [--model models/smollm2] [--num-blocks 1024] [--out bench/results/memory.json]

`base` is the interpreter with torch imported, before anything of the model is there.
"""

import argparse
import json
from pathlib import Path

import torch

from bench.cpu_steps import rows
from executor.runner import ModelRunner


def megabytes(field: str) -> float:
    """VmRSS, VmHWM or RssFile of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith(field + ":"))
    return round(int(kilobytes) / 1000, 1)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--num-blocks", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "memory.json")
    options = parser.parse_args()
    torch.ones(64, 64) @ torch.ones(64, 64)  # what torch itself sets up at its first product
    result = {"base": megabytes("VmRSS")}
    runner = ModelRunner.load(
        options.model,
        dtype=options.dtype,
        quantization=options.quantization,
        device="cpu",
        num_blocks=options.num_blocks,
        block_size=16,
        max_num_seqs=64,
    )
    result["loaded"], result["loaded_files"] = megabytes("VmRSS"), megabytes("RssFile")
    result["peak_of_loading"] = megabytes("VmHWM")
    runner.warm_up()
    for _ in range(3):
        runner.step(*rows(runner, 64, 1, 128))
    runner.step(*rows(runner, 1, 1024, 1024))
    result["after_64_sequences"], result["peak"] = megabytes("VmRSS"), megabytes("VmHWM")
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

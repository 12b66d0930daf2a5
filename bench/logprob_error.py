"""How far bfloat16 and codes are from float32: our log-probabilities and those of transformers.

    python -m bench.logprob_error [--model models/smollm2] [--tokens 2000]

The mean absolute difference to `transformers` in float32, over the probability of each next token and of the
twenty likeliest, of `transformers` in bfloat16 and of ours; and how often the likeliest token is the same.
The text is what the model itself goes on to say, from a few ids: such as it finds likely, as in use. All read
the same bfloat16 weights, but for `--quantization stored`, which reads the model's own file.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.peer_models import folder_in_bfloat16
from executor.inputs import build_inputs
from executor.plan import SamplingParams
from executor.rows import Row, SampleRow
from executor.runner import ModelRunner

NUM_TOP = 20
CONTEXT = 250
"""Tokens in one piece: several short texts are as many tokens as a long one."""


def reference(folder: Path, dtype: torch.dtype) -> Any:
    """The model as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()  # type: ignore[no-untyped-call]


@torch.inference_mode()
def texts(model: Any, num_tokens: int) -> Tensor:
    """`[num_texts, CONTEXT]` ids, begun at random and gone on with by the model."""
    count = -(-num_tokens // CONTEXT)
    generator = torch.Generator().manual_seed(0)
    begin = torch.randint(1000, model.config.vocab_size, (count, 4), generator=generator)
    ids: Tensor = model.generate(
        begin,
        attention_mask=torch.ones_like(begin),
        max_new_tokens=CONTEXT - 4,
        min_new_tokens=CONTEXT - 4,
        do_sample=True,
        temperature=0.8,
        pad_token_id=0,
    )
    return ids


@torch.inference_mode()
def theirs(model: Any, ids: Tensor) -> Tensor:
    """Log-probabilities `[num_texts, CONTEXT, vocab_size]`, float32."""
    return torch.stack([model(text[None]).logits[0].float().log_softmax(-1) for text in ids])


def ours(model: Path, ids: Tensor, quantization: str) -> Tensor:
    """The same, by our executor in bfloat16."""
    block_size = 16
    blocks = -(-CONTEXT // block_size)
    runner = ModelRunner.load(
        model,
        dtype="bfloat16",
        quantization=quantization,
        device="cpu",
        num_blocks=blocks,
        block_size=block_size,
        max_num_seqs=1,
    )
    table = np.arange(blocks, dtype=np.int32)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    found = []
    for text in ids.tolist():
        rows = [
            build_inputs([Row(0, [token], at, table, (SampleRow(params, 0, ()),))], block_size).inputs
            for at, token in enumerate(text)
        ]
        found.append(torch.cat([runner.logits(row).clone() for row in rows]).float().log_softmax(-1))
    return torch.stack(found)


def error(found: Tensor, exact: Tensor, ids: Tensor) -> float:
    """Mean absolute difference over each next token and the likeliest ones."""
    likeliest = exact[:, :-1].topk(NUM_TOP).indices
    chosen = torch.cat([ids[:, 1:, None], likeliest], dim=-1)
    return float((found[:, :-1].gather(-1, chosen) - exact[:, :-1].gather(-1, chosen)).abs().mean())


def agreement(found: Tensor, exact: Tensor) -> float:
    """Share of the places at which the likeliest token is the same."""
    return float((found.argmax(-1) == exact.argmax(-1)).float().mean())


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--folder", type=Path, default=Path("build/peers"), help="where its model goes")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "logprob_error.json")
    options = parser.parse_args()
    torch.manual_seed(0)
    folder = folder_in_bfloat16(options.model, options.folder / "models" / "hf")
    exact_model = reference(folder, torch.float32)
    ids = texts(exact_model, options.tokens)
    exact = theirs(exact_model, ids)
    del exact_model
    found = {"transformers_bfloat16": theirs(reference(folder, torch.bfloat16), ids)}
    for quantization, model in (("none", folder), ("int8", folder), ("stored", options.model)):
        found[f"chairlift_bfloat16_{quantization}"] = ours(model, ids, quantization)
    result: dict[str, Any] = {"num_tokens": ids.numel()}
    for name, each in found.items():
        result[name] = {"error": error(each, exact, ids), "same_likeliest": agreement(each, exact)}
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

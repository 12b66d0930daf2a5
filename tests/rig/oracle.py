"""What a model says when it is asked alone, by another implementation: transformers, float32, greedy.

Two right implementations may part where two tokens are about equally likely. So the oracle keeps the gap
between its two largest logits, and a first difference counts only where that gap is at least `MIN_GAP`.

Seeded sampling has no second implementation (the draw is ours): there the oracle is our own server, asked one
request at a time; see `tests.integration`.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

MIN_GAP = 1e-4


@dataclass(frozen=True, slots=True)
class Generation:
    """Greedy output ids, and for each the distance between the two largest logits."""

    token_ids: list[int]
    gaps: list[float]


class Oracle:
    """One model. Loads it at the first question that is not in `cache_folder`."""

    def __init__(self, model: Path, cache_folder: Path | None = None) -> None:
        """`model` is a Hugging Face folder, or a folder with one GGUF file."""
        self._model_path = model
        self._cache_folder = cache_folder
        self._known: dict[tuple[int, ...], Generation] = {}

    def greedy(self, prompt_token_ids: Sequence[int], num_tokens: int) -> Generation:
        """The first `num_tokens` output ids, end tokens passed over."""
        prompt = tuple(prompt_token_ids)
        known = self._known.get(prompt) or self._remembered(prompt)
        if known is None or len(known.token_ids) < num_tokens:
            known = self._compute(prompt, num_tokens)
            self._remember(prompt, known)
        self._known[prompt] = known
        return Generation(known.token_ids[:num_tokens], known.gaps[:num_tokens])

    def check(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        """Raises AssertionError unless these ids are the oracle's, up to where it is undecided itself."""
        expected = self.greedy(prompt_token_ids, len(output_token_ids))
        for index, (actual, right, gap) in enumerate(
            zip(output_token_ids, expected.token_ids, expected.gaps, strict=True)
        ):
            if actual != right:
                assert gap < MIN_GAP, (
                    f"output token {index} is {actual}, the oracle's is {right} by a margin of {gap:.2g}; "
                    f"got {list(output_token_ids)}, expected {expected.token_ids}"
                )
                return

    # --- computing ----------------------------------------------------------------------------------

    @cached_property
    def _model(self) -> Any:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        gguf_files = sorted(self._model_path.glob("*.gguf"))
        source = {"gguf_file": gguf_files[0].name} if gguf_files else {}
        model = AutoModelForCausalLM.from_pretrained(self._model_path, dtype=torch.float32, **source)
        model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]  # without end tokens
        return model.eval()  # type: ignore[no-untyped-call]

    def _compute(self, prompt: tuple[int, ...], num_tokens: int) -> Generation:
        import torch
        from transformers import GenerationConfig

        config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        torch.set_num_threads(1)  # threads that wait for each other crawl when the servers run beside
        with torch.inference_mode():
            input_ids = torch.tensor([prompt])
            mask = torch.ones_like(input_ids)
            output = self._model.generate(input_ids, attention_mask=mask, generation_config=config)
        token_ids = output.sequences[0, len(prompt) :].tolist()
        assert len(token_ids) == num_tokens
        top = [torch.topk(logits[0].float(), 2).values for logits in output.logits]
        return Generation(token_ids, [float(first - second) for first, second in top])

    # --- remembering, from one run of the tests to the next --------------------------------------------

    @cached_property
    def _identity(self) -> bytes:
        import torch
        import transformers

        digest = sha256(f"{transformers.__version__} {torch.__version__}".encode())
        for path in sorted(self._model_path.iterdir()):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
        return digest.digest()

    def _remembered(self, prompt: tuple[int, ...]) -> Generation | None:
        path = self._path(prompt)
        return Generation(**json.loads(path.read_text())) if path is not None and path.exists() else None

    def _remember(self, prompt: tuple[int, ...], generation: Generation) -> None:
        path = self._path(prompt)
        if path is not None:
            path.write_text(json.dumps(asdict(generation)))

    def _path(self, prompt: tuple[int, ...]) -> Path | None:
        if self._cache_folder is None:
            return None
        name = sha256(self._identity + json.dumps(prompt).encode()).hexdigest()[:32]
        return self._cache_folder / f"{name}.json"

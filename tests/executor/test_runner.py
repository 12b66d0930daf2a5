import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from executor.device import StepOutput
from executor.inputs import build_inputs
from executor.model import ModelError
from executor.plan import BatchPlan, NewSequence, SamplingParams
from executor.rows import Row, SampleRow
from executor.runner import ModelRunner
from executor.sequences import SequenceTable
from tests.executor.numerics import load, one_shot_logits, reference_logits
from tests.rig import tiny_model

PROMPTS = [b"A", b"the chairs keep moving", b"nobody waits for the slowest rider, " * 2, b"\x00\xff\x80"]


class Batch:
    """Sequences that run together: each step computes what each has left, up to a budget, and appends."""

    def __init__(
        self, runner: ModelRunner, prompts: list[Any], params: list[SamplingParams], seed: int = 0
    ) -> None:
        self.runner = runner
        free = list(np.random.default_rng(seed).permutation(runner.num_blocks))
        self.tables = [np.array([free.pop() for _ in range(8)], dtype=np.int32) for _ in prompts]
        self.tokens = [list(prompt) for prompt in prompts]
        self.num_prompt_tokens = [len(prompt) for prompt in prompts]
        self.computed = [0] * len(prompts)
        self.params = params
        self.outputs: list[StepOutput] = []

    def step(self, indices: list[int], budget: int) -> None:
        rows = []
        for index in indices:
            tokens, start = self.tokens[index], self.computed[index]
            end = min(len(tokens), start + budget)
            sample_row = SampleRow(self.params[index], len(tokens) - self.num_prompt_tokens[index], ())
            sample_rows = (sample_row,) if end == len(tokens) else ()
            rows.append(Row(index, tokens[start:end], start, self.tables[index], sample_rows))
            self.computed[index] = end
        batch = build_inputs(rows, self.runner.block_size)
        output = self.runner.step(batch.inputs, batch.sample_rows)
        for index, token_id in zip(batch.sampled_seq_ids, output.sampled.token_ids, strict=True):
            self.tokens[index].append(token_id)
        self.outputs.append(output)

    def output(self, index: int) -> list[int]:
        return self.tokens[index][self.num_prompt_tokens[index] :]

    def run(self, num_tokens: int, budget: int) -> list[list[int]]:
        """Generate `num_tokens` for each sequence."""
        while open_rows := [i for i in range(len(self.tokens)) if len(self.output(i)) < num_tokens]:
            self.step(open_rows, budget)
        return [self.output(index) for index in range(len(self.tokens))]


@pytest.fixture(scope="session")
def runner(tiny_folder: Path) -> ModelRunner:
    return load(tiny_folder)


MIXED = [
    SamplingParams(max_tokens=16, temperature=0.0),
    SamplingParams(max_tokens=16, temperature=0.8, seed=42),
    SamplingParams(max_tokens=16, temperature=1.2, seed=-1, top_k=20, top_p=0.9),
    SamplingParams(max_tokens=16, temperature=0.0),
]


@pytest.mark.parametrize("budget", [1, 7, 16, 64])
def test_b59_b63_output_is_the_same_alone_together_and_in_chunks(budget: int, runner: ModelRunner) -> None:
    together = Batch(runner, PROMPTS, MIXED, seed=budget).run(16, budget)
    for index, prompt in enumerate(PROMPTS):
        assert Batch(runner, [prompt], [MIXED[index]]).run(16, 1000) == [together[index]]


def test_greedy_ids_equal_the_references(runner: ModelRunner, tiny_folder: Path) -> None:
    greedy = SamplingParams(max_tokens=24, temperature=0.0)
    for prompt, output in zip(PROMPTS, Batch(runner, PROMPTS, [greedy] * 4).run(24, 16), strict=True):
        token_ids = list(prompt) + output
        logits = reference_logits(tiny_folder, token_ids[:-1])
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == output


def test_a_recompute_on_other_blocks_goes_on_with_the_same_ids(runner: ModelRunner) -> None:
    whole = Batch(runner, PROMPTS, MIXED).run(16, 1000)
    for index, prompt in enumerate(PROMPTS):
        resumed = Batch(runner, [list(prompt) + whole[index][:9]], [MIXED[index]], seed=5)
        resumed.num_prompt_tokens = [len(prompt)]
        assert resumed.run(16, 11) == [whole[index]]


@pytest.mark.parametrize("budgets", [[64], [1], [5, 7, 1]])
def test_b71_prompt_logprobs_are_the_references_however_the_prompt_is_cut(
    budgets: list[int], runner: ModelRunner, tiny_folder: Path
) -> None:
    prompt = list(b"A prompt of some length, told token by token.")
    table = SequenceTable(
        num_blocks=64, block_size=16, max_num_seqs=8, max_num_batched_tokens=256, max_seq_len=512,
        vocab_size=runner.vocab_size, eos_token_ids=(),
    )  # fmt: skip
    params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=2)
    new = NewSequence(1, tuple(prompt), len(prompt), 0, (3, 1, 4), params, prompt_logprobs_from=1)
    got, first = [], 0
    for step_id in range(1, 100):
        count = min(budgets[step_id % len(budgets)], len(prompt) - first)
        plan = BatchPlan(
            1, step_id, step_id - 1, admitted=(new,) if step_id == 1 else (), seq_ids=(1,),
            num_tokens=(count,), positions_sum=first,
        )  # fmt: skip
        batch = build_inputs(table.apply(plan), 16)
        output = runner.step(batch.inputs, batch.sample_rows)
        result = table.commit(plan, batch.sampled_seq_ids, output.sampled, output.prompt_logprobs)
        for told in result.prompt_logprobs:
            assert told.first_position == len(got) + 1
            got += told.tokens
        first += count
        if first == len(prompt):
            break
    expected = reference_logits(tiny_folder, prompt).double().log_softmax(-1)
    assert [report.token_id for report in got] == prompt[1:]
    for place, report in enumerate(got):
        assert report.logprob == pytest.approx(float(expected[place, report.token_id]), abs=1e-4)
        assert report.top_logprobs == pytest.approx(expected[place].topk(2).values.tolist(), abs=1e-4)


def test_a_step_without_sampling_rows_only_fills_the_cache(runner: ModelRunner) -> None:
    batch = Batch(runner, [b"a long prompt in pieces"], MIXED[:1])
    batch.step([0], 5)
    assert batch.outputs[0].sampled.token_ids == []
    assert batch.output(0) == []


def test_a_row_whose_logits_are_not_finite_errs_alone(tiny_folder: Path) -> None:
    runner = load(tiny_folder)
    expected = Batch(runner, PROMPTS[:3], MIXED[:3]).run(2, 1000)
    batch = Batch(runner, PROMPTS[:3], MIXED[:3])
    batch.step([0, 1, 2], 1000)
    poisoned = runner._kv_cache.layer(0)
    poisoned.values[int(batch.tables[1][0]), 0] = float("nan")
    batch.step([0, 1, 2], 1000)
    assert [error is None for error in batch.outputs[1].sampled.errors] == [True, False, True]
    assert [batch.output(0), batch.output(2)] == [expected[0], expected[2]]


def test_a_block_left_by_a_poisoned_sequence_is_clean_for_the_next(tiny_folder: Path) -> None:
    runner = load(tiny_folder)
    expected = Batch(runner, PROMPTS, MIXED).run(8, 16)
    for number in range(2):
        runner._kv_cache.layer(number).keys.fill_(float("nan"))
        runner._kv_cache.layer(number).values.fill_(float("nan"))
    assert Batch(runner, PROMPTS, MIXED).run(8, 16) == expected


def test_timings_are_microseconds_of_both_parts(runner: ModelRunner) -> None:
    batch = Batch(runner, [b"time"], MIXED[:1])
    batch.step([0], 100)
    assert batch.outputs[0].forward_us > 0
    assert batch.outputs[0].sample_us >= 0


def test_warm_up_makes_a_token_and_touches_no_block_of_a_plan(tiny_folder: Path) -> None:
    runner = load(tiny_folder)
    with capture_logs() as logs:
        runner.warm_up()
    assert [line["event"] for line in logs] == ["warmed_up"]
    keys = runner._kv_cache.layer(0).keys
    assert keys[-1].any()
    assert not keys[:-1].any()


def test_it_says_what_it_is(runner: ModelRunner) -> None:
    assert (runner.num_blocks, runner.block_size, runner.vocab_size) == (64, 16, 272)
    assert (runner.max_seq_len, runner.eos_token_ids) == (8192, (257, 259))
    assert (runner.dtype, runner.device) == ("float32", "cpu")
    numbers = {"logprobs", "prompt_logprobs", "penalties", "logit_bias", "token_lists"}
    assert set(runner.features) == numbers | {"constraints", "draft_tokens"}
    assert "float32" in runner.fingerprints.numerics
    assert len(runner.fingerprints.model) == len(runner.fingerprints.tokenizer) == 64


def test_b119_loading_says_which_number_type_is_stored_and_which_is_computed(tmp_path: Path) -> None:
    folder = tiny_model.build(tmp_path, dtype="bfloat16")
    with capture_logs() as logs:
        load(folder, dtype="float32")
    loaded = next(line for line in logs if line["event"] == "model_loaded")
    assert (loaded["dtype"], loaded["stored_as"]) == ("float32", ["BF16"])


def test_num_blocks_left_open_are_worked_out_and_logged(tiny_folder: Path) -> None:
    with capture_logs() as logs:
        runner = ModelRunner.load(
            tiny_folder, dtype="float32", device="cpu", num_blocks=None, block_size=16, max_num_seqs=2
        )
    assert runner.num_blocks == 2 * 8192 // 16
    assert any(line.get("num_blocks") == runner.num_blocks for line in logs)


@pytest.mark.parametrize("device", ["cuda", "tpu"])
def test_a_device_that_is_not_there_is_refused(
    device: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match=device):
        ModelRunner.load(
            tiny_folder, dtype="float32", device=device, num_blocks=4, block_size=16, max_num_seqs=2
        )


# --- the real model -------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def real_gguf() -> Path:
    root = Path(__file__).parents[2]
    place = Path(os.environ.get("CHAIRLIFT_TEST_MODEL", root / "models" / "smollm2"))
    files = [place] if place.suffix == ".gguf" else sorted(place.glob("*.gguf"))
    if not files:
        pytest.skip(f"no GGUF file in {place}: run `chairlift pull smollm2`")
    return files[0]


CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="session")
def real_tokenizer(real_gguf: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(real_gguf.parent, gguf_file=real_gguf.name)


@pytest.fixture(scope="session")
def real_folder(real_gguf: Path, real_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model as transformers reads it from the GGUF file, as a Hugging Face folder."""
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with the help of accelerate")
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        real_gguf.parent, gguf_file=real_gguf.name, dtype=torch.float32
    )
    folder = tmp_path_factory.mktemp("smollm2")
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads(model.config.to_json_string(use_diff=False))
    config["architectures"] = ["LlamaForCausalLM"]
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    real_tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_real_model_knows_the_capital_of_france(dtype: str, real_gguf: Path, real_tokenizer: Any) -> None:
    runner = load(real_gguf, dtype=dtype)
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    prompt = real_tokenizer.encode(CHAT, add_special_tokens=False)
    output = Batch(runner, [prompt], [greedy]).run(8, 1000)[0]
    assert output[-1] in runner.eos_token_ids
    assert real_tokenizer.decode(output[:-1]) == "The capital of France is Paris."


@pytest.mark.soak  # the reference takes its time; ids of the real model are compared in tests/integration
@pytest.mark.model
def test_the_real_models_logits_equal_the_references_from_file_and_from_folder(
    real_gguf: Path, real_folder: Path, real_tokenizer: Any
) -> None:
    prompt = real_tokenizer.encode(CHAT, add_special_tokens=False)
    from_file, from_folder = load(real_gguf), load(real_folder)
    logits = one_shot_logits(from_file, prompt)
    torch.testing.assert_close(logits, reference_logits(real_folder, prompt), atol=1e-3, rtol=0)
    assert torch.equal(one_shot_logits(from_folder, prompt), logits)
    assert from_file.fingerprints.tokenizer == from_folder.fingerprints.tokenizer
    assert from_file.eos_token_ids == from_folder.eos_token_ids

"""The arithmetic of ranks: whatever the family, the logits of one rank, and in every company the same."""

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch

from executor.operations.cpu import CpuOperations
from executor.plan import SamplingParams
from tests.executor import drafting, family_models
from tests.executor.drafting import Told
from tests.executor.gguf_models import write_gguf
from tests.executor.numerics import logits_by_steps, one_shot_logits
from tests.executor.parallel.threads import ThreadRanks, load, on_each_rank
from tests.rig import tiny_model
from tests.router.real_model import REAL_MODEL, needs_real_model

torch.set_num_threads(1)
TEXT = list(b"The slowest rider does not hold the others up: chairs keep moving.")
OTHER = list(b"Nobody waits at the foot of the hill.")
STEPS = [[(0, 5), (1, 20)], [(1, 1), (0, 30)], [(0, 1), (1, 1)], [(1, 15), (0, 30)]]


@pytest.fixture(autouse=True)
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuOperations, "refusal", lambda _: "ranks that are threads compute in torch")


def shared_out(
    path: Path, size: int, compute: Callable[[ThreadRanks], torch.Tensor] | None = None
) -> torch.Tensor:
    """The first rank's logits of all tokens of TEXT, computed by all ranks."""
    return on_each_rank(size, compute or (lambda ranks: one_shot_logits(load(path, ranks), TEXT)))[0]


@pytest.mark.parametrize("family", [each for each in family_models.FAMILIES if each != "olmoe"])
def test_every_family_has_the_logits_of_one_rank(family: str, tmp_path: Path) -> None:
    folder = family_models.build(tmp_path, family, vocab_size=129, intermediate_size=97)
    alone = one_shot_logits(load(folder), TEXT)
    torch.testing.assert_close(shared_out(folder, 2), alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_biases_count_once_and_key_value_heads_may_be_fewer_than_ranks(size: int, tmp_path: Path) -> None:
    folder = tiny_model.build(
        tmp_path, num_heads=8, num_kv_heads=2, hidden_size=128, attention_bias=True, mlp_bias=True
    )
    alone = one_shot_logits(load(folder), TEXT)
    torch.testing.assert_close(shared_out(folder, size), alone, atol=1e-4, rtol=0)


def test_pieces_in_mixed_steps_give_the_same(tmp_path: Path) -> None:
    folder = tiny_model.build(tmp_path, num_heads=8, num_kv_heads=4, hidden_size=128)

    def by_steps(ranks: ThreadRanks) -> torch.Tensor:
        return torch.cat(logits_by_steps(load(folder, ranks), [TEXT, OTHER], STEPS))

    alone = torch.cat(logits_by_steps(load(folder), [TEXT, OTHER], STEPS))
    torch.testing.assert_close(shared_out(folder, 4, by_steps), alone, atol=1e-4, rtol=0)


def test_draft_tokens_are_checked_on_all_ranks_and_change_no_token(tmp_path: Path) -> None:
    folder = tiny_model.build(tmp_path, num_heads=8, num_kv_heads=4, hidden_size=128)
    samplings = ({"temperature": 0.0}, {"temperature": 0.9, "seed": 3, "frequency_penalty": 0.5})
    admitted = [
        drafting.new(
            seq_id, prompt, SamplingParams(max_tokens=20, **sampling), range(seq_id * 8, 8 + seq_id * 8)
        )
        for seq_id, (prompt, sampling) in enumerate(zip((TEXT, OTHER), samplings, strict=True), start=1)
    ]

    def answers(ranks: ThreadRanks) -> tuple[list[Told], list[Told]]:
        runner = load(folder, ranks)
        if ranks.rank > 0:
            runner.follow()
            return [], []
        plain = drafting.run(runner, admitted)
        right = {told.new.seq_id: told.output for told in plain}

        def decide(told: Told) -> tuple[int, list[int]]:
            """Three right guesses and a wrong one."""
            coming = [*right[told.new.seq_id][len(told.output) :][:3], 0]
            return told.num_left, coming[: 19 - len(told.output)]

        guessed = drafting.run(runner, admitted, decide)
        ranks.end()
        return plain, guessed

    plain, guessed = on_each_rank(2, answers)[0]
    assert [(told.output, told.end) for told in guessed] == [(told.output, told.end) for told in plain]
    assert {told.num_steps for told in guessed} == {5}


def test_bfloat16_is_as_close_as_its_rounding(tmp_path: Path) -> None:
    folder = tiny_model.build(tmp_path, num_heads=8, num_kv_heads=4, hidden_size=128)
    exact = one_shot_logits(load(folder), TEXT)

    def distance(logits: torch.Tensor) -> float:
        return float((logits - exact).square().mean().sqrt())

    alone = distance(one_shot_logits(load(folder, dtype="bfloat16"), TEXT))
    together = distance(
        shared_out(folder, 4, lambda ranks: one_shot_logits(load(folder, ranks, "bfloat16"), TEXT))
    )
    assert 0 < together < 2 * alone


def test_a_gguf_files_quantised_columns_are_cut_like_the_numbers_they_stand_for(tmp_path: Path) -> None:
    folder = tiny_model.build(
        tmp_path / "folder", num_heads=8, num_kv_heads=4, hidden_size=128, intermediate_size=288
    )
    path = write_gguf(folder, tmp_path / "model.gguf", stored_as=gguf.GGMLQuantizationType.Q4_1)
    alone = one_shot_logits(load(path), TEXT)
    torch.testing.assert_close(shared_out(path, 4), alone, atol=1e-4, rtol=0)


@pytest.mark.model
@needs_real_model
def test_smollm2_is_shared_out_over_three_ranks() -> None:
    alone = one_shot_logits(load(REAL_MODEL), TEXT)
    logits = shared_out(REAL_MODEL, 3)
    torch.testing.assert_close(logits, alone, atol=1e-3, rtol=0)
    assert torch.equal(logits.argmax(dim=-1), alone.argmax(dim=-1))

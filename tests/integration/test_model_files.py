"""Kind 20: a model whose files are wrong stops the start with one line; what all its files say counts."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from protos.v1 import common_pb2, router_pb2
from tests.integration.prompts import prompt
from tests.rig import cluster, tiny_model
from tests.rig.client import client_of, request
from tests.rig.oracle import Oracle

Damage = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model.build(tmp_path / "model")


def failed_start(*command: str) -> tuple[int, str]:
    """Exit code and last line of a process that cannot start."""
    ended = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=60, check=False
    )
    assert "ready" not in ended.stdout
    return ended.returncode, ended.stderr.strip().splitlines()[-1]


def edited(**changes: object) -> Damage:
    """config.json with other values."""

    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def without_a_shard(folder: Path) -> None:
    """An index of three shards, two of which are there."""
    names = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    (folder / "model.safetensors").rename(folder / names[0])
    (folder / names[2]).write_bytes((folder / names[0]).read_bytes())
    weight_map = {f"tensor{place}": name for place, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def with_a_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (without_a_shard, "model-00002-of-00003.safetensors does not exist"),
        (edited(rope_scaling={"type": "foo", "factor": 2}), "kind 'foo' is not supported"),
        (edited(num_key_value_heads=3), "4 attention heads cannot be shared out over 3 key-value heads"),
        (edited(architectures=["MambaForCausalLM"]), "supported: LlamaForCausalLM, MistralForCausalLM"),
    ],
    ids=["b115", "b116", "b117", "architecture"],
)
def test_b115_an_executor_whose_model_cannot_be_served_ends_with_one_line(
    damage: Damage, sentence: str, folder: Path, tmp_path: Path
) -> None:
    damage(folder)
    code, line = failed_start("executor", "--model", str(folder), "--listen", f"unix:{tmp_path}/e.sock")
    assert code == 2
    assert line.startswith("chairlift executor: ")
    assert sentence in line


@pytest.mark.parametrize("damage", [without_tokenizer, with_a_broken_tokenizer])
def test_b120_a_router_without_a_tokenizer_ends_with_one_line(
    damage: Damage, folder: Path, tmp_path: Path
) -> None:
    damage(folder)
    flags = ["--model", str(folder), "--scheduler", f"unix:{tmp_path}/s.sock"]
    code, line = failed_start("router", *flags, "--listen", f"unix:{tmp_path}/r.sock")
    assert code == 2
    assert "router: " in line
    assert "tokenizer" in line


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [(without_a_shard, "model-00002-of-00003"), (without_tokenizer, "tokenizer")],
    ids=["dies_while_loading", "no_tokenizer"],
)
def test_b120_all_three_end_together_and_say_why(
    damage: Damage, sentence: str, folder: Path, tmp_path: Path
) -> None:
    damage(folder)
    flags = ["serve", "--model", str(folder), "--listen", f"unix:{tmp_path}/r.sock"]
    code, line = failed_start("chairlift", *flags)
    assert code == 2
    assert sentence in line


async def test_b118_each_files_end_token_ends_an_answer_and_stays_out_of_the_text(
    folder: Path, tiny_oracle: Oracle
) -> None:
    prompts = [prompt(12, salt) for salt in range(3)]
    outputs = [tiny_oracle.greedy(ids, 8).token_ids for ids in prompts]
    ends = [output[index] for output, index in zip(outputs, (3, 4, 5), strict=True)]
    assert len(set(ends)) == 3
    edited(eos_token_id=ends[0])(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends[:2]}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": tiny_model.byte_alphabet()[ends[2]]})
    )
    with cluster.running(folder) as running:
        async with client_of(running) as client:
            for ids, output in zip(prompts, outputs, strict=True):
                place = min(output.index(end) for end in ends if end in output)
                answer = await client.generate(request(ids, max_tokens=8, ignore_eos=False))
                assert answer.token_ids == output[: place + 1]
                assert answer.choice.reason == common_pb2.FINISH_REASON_STOP
                assert answer.text == bytes(output[:place]).decode("utf-8", "replace")
        assert running.router.GetModel(router_pb2.GetModelRequest(), timeout=5).dtype == "float32"

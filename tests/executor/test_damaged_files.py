"""Numbers in a model's files that were damaged: one sentence each, at once, and no memory taken for them."""

import json
import math
import shutil
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from executor.model import ModelError
from executor.model.opening import open_checkpoint
from executor.model.settings import MAX_INTEGER
from executor.runner import ModelRunner
from tests.executor import family_models
from tests.executor.gguf_models import write_gguf
from tests.executor.loading import edit_json
from tests.rig import tiny_model

MAX_TAKEN_BYTES = 64 << 20
ABSURD = [0, -1, -(2**31), 1, MAX_INTEGER, 2**31, 2**62, 10**30, 10**400, 1e308, 1e-300, "x", [], {}, True]
U32, I32, F32 = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.INT32, gguf.GGUFValueType.FLOAT32
FORMATS = {U32: "<I", I32: "<i", F32: "<f"}
ABSURD_IN_GGUF = [(U32, value) for value in (0, 1, 2**16, 2**31, 2**32 - 1)]
ABSURD_IN_GGUF += [(I32, -1), (I32, -(2**31)), (F32, float("nan")), (F32, 3e38), (F32, -1.0), (F32, 1e-38)]


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    tracemalloc.start(1)
    yield
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < MAX_TAKEN_BYTES


def load(path: Path) -> str:
    """What is said of it; nothing when it can be served."""
    try:
        ModelRunner.load(path, dtype="float32", device="cpu", num_blocks=4, block_size=16, max_num_seqs=2)
    except ModelError as error:
        said = str(error)
    else:
        return ""
    assert "\n" not in said
    assert said.endswith(".")
    assert len(said) < 1000
    return said


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Mixtures of experts, by family; built before memory is measured."""
    families = ("mixtral", "qwen_2_moe")
    return {each: family_models.build(tmp_path_factory.mktemp(each), each) for each in families}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model.build(tmp_path / "model")


@pytest.mark.parametrize("kind", ["dense", "qwen_2_moe"])
def test_no_number_of_config_json_is_believed(kind: str, folder: Path, experts: dict[str, Path]) -> None:
    folder = experts.get(kind, folder)
    config = json.loads((folder / "config.json").read_text())
    numbers = [name for name, value in config.items() if type(value) in {int, float}]
    numbers += ["head_dim", "rope_theta", "sliding_window", "num_hidden_layers", "mlp_only_layers"]
    assert len(numbers) > 8
    for name in numbers:
        for value in ABSURD:
            (folder / "config.json").write_text(json.dumps(config | {name: value}))
            load(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 2**31}, r"num_hidden_layers is 2147483648; it must be at most 1024"),
        (
            {"num_hidden_layers": 10**400},
            r"num_hidden_layers is a number of 1329 bits; it must be at most 1024",
        ),
        ({"num_hidden_layers": 900}, r"tensors model\.layers\.2\..* are missing"),
        ({"max_position_embeddings": 2**30}, r"the longest sequence is 1073741824 tokens .* at most 4194304"),
        ({"hidden_size": 2**40}, r"hidden_size is 1099511627776; it must be at most 2147483647"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1e308}},
            r"the longest sequence is \d+ tokens by the model's files; at most 4194304 are supported",
        ),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "model_type": None, "num_hidden_layers": 1000},
            r"the model's layers have 128000 experts by its files; at most 65536 are supported",
        ),
        ({"layer_types": ["x" * 5000]}, r"layer_types is \['x{298}…; it must be a list of"),
    ],
)
def test_what_is_said_of_config_json(folder: Path, changes: dict[str, Any], said: str) -> None:
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ModelError, match=said):
        ModelRunner.load(folder, dtype="float32", device="cpu", num_blocks=4, block_size=16, max_num_seqs=2)


@pytest.mark.parametrize("token_id", [2**24, 2**40, -1, 1.5, "x", None, True])
def test_an_id_of_a_token_is_a_small_number(folder: Path, token_id: object) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"]["vocab"]["Zz"] = token_id
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(
        ModelError, match=r"the id of token 'Zz' is .*; it must be a whole number from 0 to 16777215"
    ):
        open_checkpoint(folder)


def test_json_that_is_nested_without_end_is_a_sentence(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        open_checkpoint(folder)


def as_count(value: float) -> int:
    """As an unsigned number of 64 bits, as damage goes."""
    return 2**62 if math.isnan(value) else min(int(abs(value)), 2**63)


def changed(path: Path, copy: Path, beginning: str) -> Iterator[str]:
    """Each number of a GGUF file's head in turn, in `copy`, and what has been changed."""
    fields = gguf.GGUFReader(path).fields
    for name, field in fields.items():
        if not name.startswith(beginning):
            continue
        for kind, value in ABSURD_IN_GGUF:
            shutil.copy(path, copy)
            writable = gguf.GGUFReader(copy, "r+")
            parts = writable.fields[name].parts
            if name.startswith("GGUF."):
                parts[0][0] = as_count(value) & int(np.iinfo(parts[0].dtype).max)
            elif field.types[0] == gguf.GGUFValueType.ARRAY:
                parts[4][0] = as_count(value)
            elif parts[3].nbytes == 4 and field.types[0] != gguf.GGUFValueType.STRING:
                parts[2][0] = kind
                parts[3].view(np.uint32)[0] = struct.unpack("<I", struct.pack(FORMATS[kind], value))[0]
            else:
                continue
            writable.data.flush()
            yield f"{name} = {value} ({kind.name})"


@pytest.mark.parametrize(
    ("more", "beginning"),
    [
        ({}, ""),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 2.0,
                "rope__scaling__original_context_length": 64,
            },
            "llama.rope",
        ),
        ({"attention__sliding_window": 32}, "llama.attention.sliding"),
        ({"expert_weights_scale": 1.0, "rope__freq_base": 1e6}, "llama.expert"),
    ],
    ids=["plain", "yarn", "window", "experts"],
)
def test_no_number_of_a_gguf_file_is_believed(
    folder: Path, experts: dict[str, Path], tmp_path: Path, more: dict[str, Any], beginning: str
) -> None:
    folder = experts["mixtral"] if beginning == "llama.expert" else folder
    path, copy = write_gguf(folder, tmp_path / "model.gguf", **more), tmp_path / "copy.gguf"
    assert load(path) == ""
    said = {what: load(copy) for what in changed(path, copy, beginning)}
    assert len(said) >= len(ABSURD_IN_GGUF) * max(1, len(more) - 1)
    if not more:
        layers = said[f"llama.block_count = {2**31} (UINT32)"]
        assert layers.endswith("llama.block_count is 2147483648; it must be at most 1024.")
        assert said[f"llama.context_length = {2**31} (UINT32)"].endswith("it must be at most 2147483647.")


def test_no_byte_of_a_gguf_file_is_believed(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(folder, tmp_path / "model.gguf")
    whole, end = path.read_bytes(), gguf.GGUFReader(path).data_offset
    random = np.random.default_rng(0)
    num_refused = 0
    for _ in range(150):
        damaged = bytearray(whole)
        for place in random.integers(0, end, 3):
            damaged[place] = random.integers(256)
        path.write_bytes(damaged)
        num_refused += load(path) != ""
    assert num_refused > 20

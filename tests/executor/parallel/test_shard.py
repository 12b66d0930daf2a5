"""Shards of a model: together they are the whole of it, and each is a smaller model by itself."""

from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.model import ModelError
from executor.model.checkpoint import Checkpoint, StoredTensor
from executor.model.config import LayerKind, Mixture, ModelConfig, Rope
from executor.model.opening import open_checkpoint
from executor.model.weights import check_names_and_shapes
from executor.parallel.shard import Shard
from tests.executor import family_models
from tests.executor.gguf_models import write_gguf
from tests.executor.loading import weights, weights_of
from tests.rig import tiny_model

Kind = gguf.GGMLQuantizationType


def model(num_heads: int, num_kv_heads: int, *, mlp: int = 64, vocabulary: int = 64) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=mlp,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=16,
        max_seq_len=64,
        layers=(LayerKind(Rope(1e4)),),
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        attention_scale=0.25,
    )


def spans(config: ModelConfig, size: int, name: str) -> list[range]:
    found = [getattr(Shard(config, rank, size), name) for rank in range(size)]
    return [range(each.start, each.stop) for each in found]


@settings(deadline=None)
@given(
    kv_heads=st.integers(1, 8),
    together=st.integers(1, 8),
    size=st.integers(1, 16),
    mlp=st.integers(16, 200),
    vocabulary=st.integers(16, 200),
)
def test_every_row_is_somebodys_and_every_head_reads_its_own_keys(
    kv_heads: int, together: int, size: int, mlp: int, vocabulary: int
) -> None:
    config = model(kv_heads * together, kv_heads, mlp=mlp, vocabulary=vocabulary)
    try:
        Shard(config, 0, size)
    except ModelError:
        assert config.num_heads % size or (kv_heads % size and size % kv_heads)
        return
    for name, total in (("heads", config.num_heads), ("mlp", mlp), ("vocabulary", vocabulary)):
        parts = spans(config, size, name)
        assert [row for part in parts for row in part] == list(range(total))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for heads, own in zip(spans(config, size, "heads"), spans(config, size, "kv_heads"), strict=True):
        shared = len(heads) // len(own)  # query heads of a shard that read the same keys
        assert [head // together for head in heads] == [own[i // shared] for i in range(len(heads))]


def test_key_value_heads_are_held_by_several_ranks_where_there_are_fewer() -> None:
    assert spans(model(8, 2), 4, "kv_heads") == [range(1), range(1), range(1, 2), range(1, 2)]
    assert Shard(model(8, 2), 3, 4).config.num_kv_heads == 1


@pytest.mark.parametrize("size", [2, 4])
def test_smollm2_cannot_be_shared_out_over_two_or_four_and_the_sentence_has_the_numbers(size: int) -> None:
    with pytest.raises(ModelError) as refused:
        Shard(model(9, 3), 0, size)
    assert str(refused.value) == (
        "a model of 9 attention heads and 3 key-value heads cannot be shared out "
        f"over {size} ranks: the heads must be a multiple of the ranks, and the key-value heads too, "
        "or the ranks a multiple of them. --tensor-parallel can be 1, 3 or 9."
    )


def test_heads_that_are_normed_together_are_refused() -> None:
    whole = replace(model(4, 4), norms_heads_together=True)
    Shard(whole, 0, 1)
    with pytest.raises(ModelError, match="norms the heads of a token together cannot be shared out"):
        Shard(whole, 1, 2)


def test_an_mlp_of_fewer_rows_than_ranks_is_refused() -> None:
    with pytest.raises(ModelError, match="intermediate_size 3 cannot be shared out over 4 ranks"):
        Shard(model(4, 4, mlp=3), 0, 4)


# --- of files ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["safetensors", "gguf f32", "gguf q8_0", "gguf q4_1"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Eight heads, four key-value heads, and an MLP of which no rank's part ends with a quantised block."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model.build(
        folder, num_heads=8, num_kv_heads=4, hidden_size=128, intermediate_size=288, attention_bias=True
    )
    if request.param == "safetensors":
        return open_checkpoint(folder)
    tiny_model.build(folder, num_heads=8, num_kv_heads=4, hidden_size=128, intermediate_size=288)
    kind = Kind[request.param.split()[1].upper()]
    return open_checkpoint(write_gguf(folder, folder / "model.gguf", stored_as=kind))


CUTS = {
    "q_proj": 0,
    "k_proj": 0,
    "v_proj": 0,
    "gate_proj": 0,
    "up_proj": 0,
    "embed_tokens": 0,
    "lm_head": 0,
    "o_proj": 1,
    "down_proj": 1,
}


@pytest.mark.parametrize("size", [2, 4])
def test_every_expert_is_cut_and_its_router_is_whole(size: int, tmp_path: Path) -> None:
    family_models.build(tmp_path, "qwen_2_moe", num_key_value_heads=4, moe_intermediate_size=41)
    checkpoint = open_checkpoint(tmp_path)
    shards = [Shard(checkpoint.config, rank, size).of(checkpoint) for rank in range(size)]
    for shard in shards:
        check_names_and_shapes(shard)
        assert weights_of(shard).fingerprint == weights(tmp_path).fingerprint
    for name in ("experts.7.gate_proj", "experts.7.down_proj", "shared_expert.up_proj", "gate"):
        whole = checkpoint.tensors[f"model.layers.1.mlp.{name}.weight"].read()
        parts = [shard.tensors[f"model.layers.1.mlp.{name}.weight"].read() for shard in shards]
        dimension = CUTS.get(name.rsplit(".", maxsplit=1)[-1])
        if dimension is None:
            assert all(torch.equal(part, whole) for part in parts)
        else:
            assert torch.equal(torch.cat(parts, dim=dimension), whole)


def test_experts_of_fewer_rows_than_ranks_are_refused() -> None:
    dense = model(4, 4, mlp=3)
    kind = replace(dense.layers[0], has_experts=True)
    mixture = Mixture(4, 2, 64, norm_topk_prob=True)
    # An MLP that no layer has may be as narrow as it likes.
    Shard(replace(dense, layers=(kind,), mixture=mixture), 0, 4)
    for narrow, sentence in (
        (replace(mixture, intermediate_size=2), "experts of intermediate_size 2 cannot be"),
        (replace(mixture, shared_intermediate_size=3), "a shared expert of intermediate_size 3 cannot be"),
    ):
        with pytest.raises(ModelError, match=f"a model with {sentence} shared out over 4 ranks"):
            Shard(replace(dense, layers=(kind,), mixture=narrow), 0, 4)


@pytest.mark.parametrize("size", [2, 4])
def test_the_shards_laid_side_by_side_are_the_tensor(size: int, checkpoint: Checkpoint) -> None:
    shards = [Shard(checkpoint.config, rank, size).of(checkpoint) for rank in range(size)]
    for name, whole in checkpoint.tensors.items():
        parts = [shard.tensors[name].read() for shard in shards]
        assert [tuple(part.shape) for part in parts] == [shard.tensors[name].shape for shard in shards]
        part_of_layer, kind = name.split(".")[-2:]
        if (dimension := CUTS.get(part_of_layer)) is None:
            assert all(torch.equal(part, whole.read()) for part in parts)
        elif dimension == 1 and kind == "bias":
            assert torch.equal(parts[0], whole.read())
            assert not any(part.any() for part in parts[1:])
        else:
            assert torch.equal(torch.cat(parts, dim=dimension), whole.read()), name


def test_a_shard_is_a_model_that_fits_its_own_shape(checkpoint: Checkpoint) -> None:
    for rank in range(4):
        check_names_and_shapes(Shard(checkpoint.config, rank, 4).of(checkpoint))


def test_a_model_has_one_fingerprint_however_it_is_shared_out(checkpoint: Checkpoint) -> None:
    alone = weights(checkpoint.path).fingerprint
    for rank in (0, 3):
        shard = Shard(checkpoint.config, rank, 4).of(checkpoint)
        assert weights_of(shard).fingerprint == alone
        assert weights_of(shard).num_bytes < weights(checkpoint.path).num_bytes / 3


def test_a_tensor_of_another_shape_is_refused_as_it_stands_in_the_file(checkpoint: Checkpoint) -> None:
    wrong = dict(checkpoint.tensors)
    wrong["model.layers.0.mlp.down_proj.weight"] = StoredTensor((128, 17), "F32", lambda *_: torch.zeros(1))
    with pytest.raises(ModelError, match=r"shape \[128, 17\]; .* needs \[128, 288\]"):
        Shard(checkpoint.config, 1, 2).of(replace(checkpoint, tensors=wrong))


def test_a_rank_reads_no_more_than_its_part(checkpoint: Checkpoint) -> None:
    asked: list[tuple[slice, slice]] = []

    def read(rows: slice, columns: slice) -> torch.Tensor:
        asked.append((rows, columns))
        return torch.zeros(128, 288)[rows, columns]

    name = "model.layers.0.mlp.down_proj.weight"
    tensors = {**checkpoint.tensors, name: StoredTensor((128, 288), "F32", read)}
    Shard(checkpoint.config, 1, 4).of(replace(checkpoint, tensors=tensors)).tensors[name].read()
    assert asked == [(slice(None), slice(72, 144))]

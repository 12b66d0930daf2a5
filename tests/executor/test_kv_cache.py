import numpy as np
import pytest
import torch

from executor import kv_cache, memory
from executor.kv_cache import KVCache, begun_blocks, bytes_per_block, default_num_blocks
from executor.model import ModelError
from executor.model.config import LayerKind, ModelConfig, Rope

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    vocab_size=272,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_seq_len=100,
    rms_norm_eps=1e-5,
    layers=(LayerKind(Rope(1e4)),) * 3,
    tie_word_embeddings=True,
    attention_scale=0.25,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_are_views_block_by_block_with_a_heads_run_contiguous(dtype: torch.dtype) -> None:
    cache = KVCache(CONFIG, num_blocks=5, block_size=8, dtype=dtype, device=CPU)
    keys = cache.layer(2).keys
    assert keys.shape == (6, 8, 2, 16)
    assert keys.dtype == dtype
    assert keys[3, :, 1].is_contiguous()
    assert not keys.any()
    assert not cache.layer(2).values.any()


def test_a_heads_values_lie_right_behind_its_keys() -> None:
    layer = KVCache(CONFIG, num_blocks=5, block_size=8, dtype=torch.bfloat16, device=CPU).layer(1)
    assert layer.values[2, :, 1].data_ptr() - layer.keys[2, :, 1].data_ptr() == 8 * 16 * 2


def test_layers_keys_and_values_do_not_overlap() -> None:
    cache = KVCache(CONFIG, num_blocks=2, block_size=4, dtype=torch.float32, device=CPU)
    for number in range(3):
        cache.layer(number).keys.fill_(number + 1)
        cache.layer(number).values.fill_(-number - 1)
    for number in range(3):
        assert (cache.layer(number).keys == number + 1).all()
        assert (cache.layer(number).values == -number - 1).all()


def test_a_step_begins_the_blocks_whose_first_slot_it_writes_and_they_are_cleared_in_all_layers() -> None:
    # The end of block 1, all of block 0, the beginning of block 4.
    begun = begun_blocks(np.array([6, 7, 0, 1, 2, 3, 16]), 4)
    assert begun.tolist() == [0, 4]
    cache = KVCache(CONFIG, num_blocks=5, block_size=4, dtype=torch.float32, device=CPU)
    for number in range(3):
        cache.layer(number).keys.fill_(torch.nan)
        cache.layer(number).values.fill_(torch.inf)
    cache.clear(torch.from_numpy(begun))
    for number in range(3):
        for side in (cache.layer(number).keys, cache.layer(number).values):
            assert [not side[block].any() for block in range(6)] == [True, False, False, False, True, False]


def test_the_trash_block_is_no_block_of_a_plan() -> None:
    cache = KVCache(CONFIG, num_blocks=5, block_size=8, dtype=torch.float32, device=CPU)
    assert cache.trash_block_id not in range(cache.num_blocks)
    assert cache.layer(0).keys.shape[0] == cache.trash_block_id + 1


def test_bytes_per_block_count_layers_keys_values_and_number_type() -> None:
    assert bytes_per_block(CONFIG, 16, torch.float32) == 3 * 2 * 2 * 16 * 16 * 4
    assert bytes_per_block(CONFIG, 16, torch.bfloat16) == 3 * 2 * 2 * 16 * 16 * 2


def default(
    monkeypatch: pytest.MonkeyPatch, available_bytes: int, max_num_seqs: int, num_sharers: int = 1
) -> int:
    monkeypatch.setattr(kv_cache, "available_memory_bytes", lambda: available_bytes)
    return default_num_blocks(
        CONFIG,
        block_size=16,
        dtype=torch.float32,
        max_num_seqs=max_num_seqs,
        num_sharers=num_sharers,
    )


def test_default_takes_a_share_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    per_block = bytes_per_block(CONFIG, 16, torch.float32)
    assert default(monkeypatch, 100 * per_block, 1000) == 39  # 40 %, the trash block taken off


def test_ranks_on_one_machine_take_equal_parts_of_that_share(monkeypatch: pytest.MonkeyPatch) -> None:
    per_block = bytes_per_block(CONFIG, 16, torch.float32)
    assert default(monkeypatch, 100 * per_block, 1000, num_sharers=4) == 9  # each with a trash block


def test_another_cache_has_the_same_shape_but_for_its_blocks() -> None:
    cache = KVCache(CONFIG, num_blocks=5, block_size=8, dtype=torch.bfloat16, device=CPU).another(2)
    assert (cache.num_blocks, cache.block_size) == (2, 8)
    assert cache.layer(0).keys.shape == (3, 8, 2, 16)
    assert cache.layer(0).keys.dtype == torch.bfloat16


def test_no_pages_are_wanted_ahead_of_the_block_of_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "HUGE_PAGE_BYTES", 4096)
    cache = KVCache(CONFIG, num_blocks=64, block_size=8, dtype=torch.float32, device=CPU)
    while cache.take_pages_ahead():
        pass
    cache.used(cache.trash_block_id)
    assert not cache.take_pages_ahead()
    cache.used(63)
    assert cache.take_pages_ahead()


def test_default_leaves_memory_to_others_on_a_large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    per_block = bytes_per_block(CONFIG, 16, torch.float32)
    assert default(monkeypatch, 1 << 40, 1_000_000) == (4 << 30) // per_block - 1


def test_default_takes_no_more_than_all_sequences_can_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default(monkeypatch, 1 << 40, 4) == 4 * 7  # 100 tokens are 7 blocks


def test_no_memory_for_a_block_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="free memory, or give num_blocks"):
        default(monkeypatch, 1000, 4)


def test_a_cache_beyond_the_machine_is_refused_with_its_size() -> None:
    with pytest.raises(ModelError, match=r"num_blocks 1000000000000 .* GiB on cpu"):
        KVCache(CONFIG, num_blocks=10**12, block_size=16, dtype=torch.float32, device=CPU)


def test_available_memory_is_a_sensible_number() -> None:
    assert 1 << 20 < kv_cache.available_memory_bytes() < 1 << 50

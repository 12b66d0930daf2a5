"""Our kernels between a GPU's products, in Triton's interpreter, beside plain torch; whether they compile.

What has no sum over a row in it has plain torch's bits. A norm's sum is made in another order: what comes out
of one is a few last bits off in float32, and at most one rounding in a half type.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed (extra `triton`)")

from executor.attention.base import AttentionSpec
from executor.attention.flash3 import Flash3Attention
from executor.attention.reference import ReferenceAttention
from executor.captured import captured_sizes, padded
from executor.inputs import StepInputs
from executor.kv_cache import LayerCache, layers_of
from executor.model.config import Mixture, Rope
from executor.model.rope import rope_table
from executor.operations import fused, triton_kernels
from executor.operations.arranged import arranged
from executor.operations.base import Activation, Linear, Mlp, Norm
from executor.operations.fused import MOST_WIDTH, FusedOperations
from executor.operations.plain import PlainOperations
from executor.runner import ModelRunner
from executor.selection import select_operations
from tests.executor import family_models
from tests.executor.attending import spec, step_inputs
from tests.executor.interpreter import like_a_gpu
from tests.executor.late import load_late
from tests.executor.numerics import logits_by_steps
from tests.executor.test_attention_triton import compile_for_hopper
from tests.executor.test_captured import capturing, contexts, decode_step
from tests.rig import fake_flash
from tests.rig.fake_device import FakeDevice, as_one_kernel

torch.set_num_threads(1)

LAST_BITS = 8 * 2.0**-24
"""Of a norm in float32, whose sum was made in another order; relative."""
HALF_TYPES = [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, *HALF_TYPES]

dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module", autouse=True)
def _like_a_gpu() -> Iterator[None]:
    with like_a_gpu():
        yield


def both(of: AttentionSpec) -> tuple[FusedOperations, PlainOperations]:
    return FusedOperations(ReferenceAttention(of)), PlainOperations(ReferenceAttention(of))


def random(rng: np.random.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """NaNs are compared too: where nothing was written, there is one on both sides."""
    whole = {2: torch.int16, 4: torch.int32}[found.itemsize]
    return found.dtype == expected.dtype and torch.equal(
        found.contiguous().view(whole), expected.contiguous().view(whole)
    )


def one_rounding(found: Tensor, expected: Tensor, of: Tensor, *, roundings: int = 1) -> bool:
    """Whether they are one rounding of their type apart, where float32 is `LAST_BITS` of `of` off."""
    assert found.dtype == expected.dtype
    rounding = 0.0 if found.dtype == torch.float32 else roundings * torch.finfo(found.dtype).eps
    smallest = torch.finfo(found.dtype).smallest_normal
    allowed = rounding * expected.double().abs().clamp(min=smallest) + LAST_BITS * of.double().abs()
    return bool(((found.double() - expected.double()).abs() <= allowed).all())


# --- norms ----------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    num_tokens=st.integers(1, 5),
    width=st.sampled_from([1, 16, 72, 576, 2048, 3000]),
    dtype=dtypes,
    scale=st.sampled_from([1e-4, 1.0, 300.0]),
    adds=st.sampled_from(["nothing", "update", "normed update"]),
    seed=seeds,
)
def test_sums_and_norms_equal_plain_torch(
    num_tokens: int, width: int, dtype: torch.dtype, scale: float, adds: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    kernels, plain = both(spec(dtype=dtype))
    norm, other = Norm(random(rng, width) + 1.0, 1e-6), Norm(random(rng, width), 1e-2)
    before = random(rng, num_tokens, width) * scale
    states, theirs = before.clone(), before.clone()
    if adds == "nothing":
        found, expected = kernels.norm(states, norm), plain.norm(theirs, norm)
    else:
        update = (random(rng, num_tokens, width) * scale).to(dtype)
        by = other if adds == "normed update" else None
        found = kernels.add_norm(states, update, norm, update_norm=by)
        expected = plain.add_norm(theirs, update, norm, update_norm=by)
    of = expected.float().abs()
    if adds == "normed update":  # what comes after it is the norm of sums that are last bits off themselves
        sums = before.abs() + (theirs - before).abs()
        assert one_rounding(states, theirs, sums)
        of = of + sums * norm.weight.abs() * (theirs.pow(2).mean(-1, keepdim=True) + norm.eps).rsqrt()
    else:
        assert same_bits(states, theirs)
    assert one_rounding(found, expected, of)


# --- heads ----------------------------------------------------------------------------------------


TRASH = 60


class Heads:
    """A step's projections for one layer, over a cache of nothing but NaN."""

    def __init__(self, of: AttentionSpec, inputs: StepInputs, rng: np.random.Generator) -> None:
        self.spec, self.inputs = of, inputs
        width = (of.num_heads + 2 * of.num_kv_heads) * of.head_dim
        self.qkv = random(rng, len(inputs.token_ids), width, dtype=of.dtype)
        self.rope = rope_table(Rope(1e4), of.head_dim, 64, None, of.device)

    @classmethod
    def mixed(cls, of: AttentionSpec, rng: np.random.Generator) -> "Heads":
        return cls(of, step_inputs([(1, 3), (1, 40), (3, 9)], of.block_size, TRASH, rng), rng)

    def through(
        self, operations: PlainOperations, query_norm: Norm | None, key_norm: Norm | None
    ) -> tuple[Tensor, LayerCache]:
        of = self.spec
        shape = (2, TRASH + 1, of.num_kv_heads, 2, of.block_size, of.head_dim)
        _, cache = layers_of(torch.full(shape, torch.nan, dtype=of.dtype))
        query = operations.rotate_and_store(
            self.qkv,
            operations.prepare(self.inputs),
            cache,
            rope=self.rope,
            query_norm=query_norm,
            key_norm=key_norm,
        )
        return query, cache


heads_of_a_model = st.builds(
    spec,
    num_kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3, 4]),
    head_dim=st.sampled_from([2, 16, 20, 64, 80, 256]),
    block_size=st.sampled_from([1, 5, 16]),
    dtype=dtypes,
)


@settings(max_examples=15)
@given(of=heads_of_a_model, seed=seeds)
def test_heads_without_norms_and_the_cache_have_plain_torchs_bits(of: AttentionSpec, seed: int) -> None:
    heads = Heads.mixed(of, np.random.default_rng(seed))
    (query, cache), (expected, written) = (heads.through(each, None, None) for each in both(of))
    assert query.shape == expected.shape
    assert same_bits(query, expected)
    assert same_bits(cache.keys, written.keys)
    assert same_bits(cache.values, written.values)


@settings(max_examples=15)
@given(of=heads_of_a_model, seed=seeds, normed=st.sampled_from(["both", "query", "key"]))
def test_heads_that_are_normed_equal_plain_torch(of: AttentionSpec, seed: int, normed: str) -> None:
    rng = np.random.default_rng(seed)
    heads = Heads.mixed(of, rng)
    norms = [
        Norm(random(rng, of.head_dim), eps) if normed in {"both", which} else None
        for which, eps in (("query", 1e-6), ("key", 1e-2))
    ]
    (query, cache), (expected, written) = (heads.through(each, *norms) for each in both(of))

    def is_near(found: Tensor, wanted: Tensor) -> bool:
        # What is turned is a difference: it may be small beside the two numbers that it is made of.
        both_halves = wanted.float().unflatten(-1, (2, -1)).norm(dim=-2, keepdim=True)
        return one_rounding(found, wanted, both_halves.expand(*wanted.shape[:-1], 2, -1).flatten(-2))

    is_slot = ~written.values.isnan()
    assert is_near(query, expected)
    assert is_near(cache.keys.masked_fill(~is_slot, 0.0), written.keys.masked_fill(~is_slot, 0.0))
    assert torch.equal(cache.keys.isnan(), written.keys.isnan())
    assert same_bits(cache.values, written.values)


def test_padding_is_written_into_the_trash_block_alone() -> None:
    of = spec(dtype=torch.float16)
    ours, _ = both(of)
    rng = np.random.default_rng(0)
    heads = Heads(of, step_inputs([(1, 3), (1, 40)], of.block_size, TRASH, rng), rng)
    _, alone = heads.through(ours, None, None)
    heads.inputs = padded(heads.inputs, 8, TRASH, of.block_size)
    heads.qkv = torch.cat([heads.qkv, torch.ones(6, heads.qkv.shape[1], dtype=of.dtype)])
    _, cache = heads.through(ours, None, None)
    for side, others in ((cache.keys, alone.keys), (cache.values, alone.values)):
        assert same_bits(side[:TRASH], others[:TRASH])
        assert (~side[TRASH].isnan()).all(dim=-1).all(dim=-1).tolist() == [True] + [False] * 15


def test_a_slot_lies_where_it_lies_in_a_cache_of_more_numbers_than_int32_counts() -> None:
    of = spec(num_kv_heads=1, group=1, dtype=torch.float16)
    block_numbers = 2 * of.block_size * of.head_dim
    block = 2**31 // block_numbers + 3
    # 4 GiB of addresses, of which one page is touched.
    (cache,) = layers_of(torch.empty(1, block + 1, 1, 2, of.block_size, of.head_dim, dtype=of.dtype))
    rng = np.random.default_rng(0)
    inputs = step_inputs([(1, 3)], of.block_size, 1, rng)
    heads = Heads(of, replace(inputs, slot_mapping=np.array([block * of.block_size + 2])), rng)
    ours, _ = both(of)
    ours.rotate_and_store(
        heads.qkv, ours.prepare(heads.inputs), cache, rope=heads.rope, query_norm=None, key_norm=None
    )
    assert torch.equal(cache.values[block, 2], heads.qkv[:, -of.head_dim :])


# --- the MLP's gate -------------------------------------------------------------------------------


def gates(of: AttentionSpec, gate: Tensor, up: Tensor, activation: Activation) -> list[Tensor]:
    """`gated` of our kernels and of plain torch, where the product is `gate` and `up`."""
    layer = Linear(torch.empty(0), None, 1, gate.shape[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("executor.operations.plain._linear", lambda *_: torch.cat([gate, up], dim=1))
        return [each.gated(torch.empty(0), layer, activation) for each in both(of)]


@pytest.mark.parametrize("activation", Activation)
@settings(max_examples=40)
@given(
    num_tokens=st.integers(1, 4),
    width=st.sampled_from([1, 24, 1025]),
    dtype=dtypes,
    scale=st.sampled_from([1e-3, 1.0, 5.0, 40.0]),
    seed=seeds,
)
def test_gates_equal_plain_torch(
    activation: Activation, num_tokens: int, width: int, dtype: torch.dtype, scale: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    gate = (random(rng, num_tokens, width) * scale).to(dtype)
    up = random(rng, num_tokens, width, dtype=dtype)
    found, expected = gates(spec(dtype=dtype), gate, up, activation)
    assert found.shape == expected.shape
    # Half types are rounded after the activation and after the product.
    of = expected.float().abs()
    if activation is Activation.GELU_TANH:  # of plain torch's 1 + tanh, no more than a last bit of 1 is right
        of = of + (gate.float() * up.float()).abs()
    assert one_rounding(found, expected, of, roundings=2)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_numbers_are_rounded_where_plain_torch_rounds_them(
    activation: Activation, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(0)
    gate, up = random(rng, 2, 5, 2000, dtype=dtype)
    ours, plain = both(spec(dtype=dtype))
    norm = Norm(random(rng, 2000), 1e-6)
    for found, expected in (
        gates(spec(dtype=dtype), gate, up, activation),
        [each.norm(gate.float(), norm) for each in (ours, plain)],
    ):
        # One more rounding, or one less, shows in a number of four.
        assert (found == expected).double().mean() > 0.99


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_of_any_size_are_finite_and_a_nan_stays_one(activation: Activation, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    gate = torch.tensor([[-largest, -200.0, -88.5, -0.0, 1.0, 88.5, largest, torch.nan]]).to(dtype)
    found, expected = gates(spec(dtype=dtype), gate, torch.ones_like(gate), activation)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert found[0, :7].isfinite().all()


# --- experts --------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(
    num_tokens=st.sampled_from([1, 2, 7, 40, 90]),
    num_experts=st.sampled_from([1, 4, 33]),
    per_token=st.integers(1, 4),
    sizes=st.sampled_from([(64, 64), (72, 40), (130, 200)]),
    shared=st.sampled_from([None, 24]),
    normed=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16]),  # the interpreter cannot multiply bfloat16
    seed=seeds,
)
def test_mixtures_equal_plain_torch(
    num_tokens: int,
    num_experts: int,
    per_token: int,
    sizes: tuple[int, int],
    shared: int | None,
    normed: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    hidden, width = sizes
    mixture = Mixture(num_experts, min(per_token, num_experts), width, normed, shared)
    widths = [width] * num_experts + ([] if shared is None else [shared])
    weights = [
        (random(rng, 2 * each, hidden, dtype=dtype) / 8, random(rng, hidden, each, dtype=dtype) / 8)
        for each in widths
    ]
    router, inputs = random(rng, len(widths), hidden), random(rng, num_tokens, hidden, dtype=dtype)
    found, expected = (
        each.mixture(
            inputs,
            each.pack_experts(
                router,
                [Mlp(each.pack_gated(gate_up, None), each.pack(down, None)) for gate_up, down in weights],
                mixture,
            ),
            Activation.SILU,
        )
        for each in both(spec(dtype=dtype))
    )
    assert found.dtype == expected.dtype
    # A half type is rounded after each product, and what is rounded otherwise is summed over.
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < (1e-6 if dtype == torch.float32 else 1e-3)


def test_rows_are_arranged_by_their_experts_in_tiles_of_one() -> None:
    chosen = torch.tensor([[0, 3], [1, 3], [0, 3], [0, 3], [0, 1]])
    rows = arranged(chosen, 5, 2)
    assert rows.tokens.tolist() == [0, 2, 3, 4, 1, 4, 0, 1, 2, 3]
    assert rows.ends.tolist() == [4, 6, 6, 10, 10]
    assert rows.tile_experts.tolist() == [0, 0, 1, 3, 3, 5, 5, 5, 5, 5]
    assert rows.tile_rows[:5].tolist() == [0, 2, 4, 6, 8]
    assert rows.tokens[rows.places].tolist() == [[token] * 2 for token in range(5)]


# --- whole models ---------------------------------------------------------------------------------


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedOperations, "refusal", classmethod(lambda *_: None))


def pieces(runner: ModelRunner) -> list[Tensor]:
    texts = [list(b"The slowest rider does not hold"), list(b"the others up.")]
    steps = [[(0, 9)], [(0, 18), (1, 1)], [(0, 1), (1, 9)], [(1, 1), (0, 1)]]
    return logits_by_steps(runner, texts, steps, seed=3)


@pytest.mark.parametrize(
    "family",
    [
        *("llama_3", "smollm", "mistral", "qwen_2", "qwen_3_bias", "gemma_2", "gemma_3"),
        *("mixtral", "olmoe", "qwen_2_moe", "qwen_3_moe"),
    ],
)
def test_a_model_of_each_family_equals_plain_torch(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = family_models.build(tmp_path, family, num_hidden_layers=2)
    plain = load_late(folder, monkeypatch)
    monkeypatch.setattr(FusedOperations, "refusal", classmethod(lambda *_: None))
    ours = load_late(folder, monkeypatch)
    assert "torch with fused kernels, reference attention" in ours.fingerprints.numerics
    for found, expected in zip(pieces(ours), pieces(plain), strict=True):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


class InOneCall(FusedOperations):
    """Each kernel as one call to a graph of torch's operations, which does not see into the interpreter."""

    def norm(self, *args: Any) -> Tensor:
        compute = super().norm
        return as_one_kernel(lambda: compute(*args))

    def add_norm(self, *args: Any, **options: Any) -> Tensor:
        compute = super().add_norm
        return as_one_kernel(lambda: compute(*args, **options))

    def gated(self, *args: Any) -> Tensor:
        compute = super().gated
        return as_one_kernel(lambda: compute(*args))

    def rotate_and_store(self, *args: Any, **options: Any) -> Tensor:
        compute = super().rotate_and_store
        return as_one_kernel(lambda: compute(*args, **options))

    def _gate(self, *args: Any) -> Tensor:
        compute = super()._gate
        return as_one_kernel(lambda: compute(*args))

    def _multiplied(self, *args: Any) -> Tensor:
        compute = super()._multiplied
        return as_one_kernel(lambda: compute(*args))


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize("family", ["dense", "qwen_2_moe"])
def test_captured_steps_equal_steps_that_were_not_captured(
    family: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family != "dense":
        tiny_folder = family_models.build(tmp_path, family, vocab_size=300, max_position_embeddings=2048)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash.flash_attn_interface())
    monkeypatch.setattr("executor.selection.FusedOperations", InOneCall)
    device = FakeDevice()
    runner = capturing(Flash3Attention, monkeypatch, tiny_folder, device, dtype="bfloat16", max_num_seqs=2)
    assert len(device.graphs) == len(captured_sizes(2))
    contexts(runner, 1)
    plans = [[3, 40], [20, 5], [33]]
    pipeline = runner.pipeline
    assert pipeline is not None
    assert pipeline._captured is not None
    for seed, lengths in enumerate(plans):
        batch = decode_step(lengths, runner.num_blocks, runner.block_size, seed)
        output = pipeline.collect(pipeline.launch(batch, lambda: None))
        size = next(each for each in captured_sizes(2) if each >= len(lengths))
        eager = padded(batch.inputs, size, runner._kv_cache.trash_block_id, runner.block_size)
        assert output.sampled == runner.step(eager, batch.sample_rows).sampled
        with torch.inference_mode():
            hidden = runner._model.forward(eager, runner._kv_cache)
        assert pipeline._captured._result is not None
        assert same_bits(pipeline._captured._result[:size], hidden.normed)
    assert sum(graph.num_replays for graph in device.graphs) == len(plans)


# --- who is taken ---------------------------------------------------------------------------------


def on_cuda(**changes: Any) -> AttentionSpec:
    return replace(spec(**changes), device=torch.device("cuda"))


def taken(of: AttentionSpec, hidden_size: int = 4096, attention: str | None = None) -> dict[str, Any]:
    with capture_logs() as logs:
        operations = select_operations(lambda own: replace(of, block_size=own), attention, hidden_size)
    (line,) = [line for line in logs if line["event"] == "operations_selected"]
    assert line["operations"] == operations.name
    assert isinstance(operations, FusedOperations) == ("fused" in operations.name)
    return line


@pytest.fixture
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    not_built = fused.not_built
    monkeypatch.setattr(fused, "not_built", lambda _: not_built(torch.device("cpu")))


@pytest.mark.usefixtures("_hopper")
def test_a_gpu_gets_the_fused_kernels_whatever_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash.flash_attn_interface())
    bfloat16 = on_cuda(dtype=torch.bfloat16)
    assert taken(bfloat16)["operations"] == "torch with fused kernels, flash3 attention"
    for name in ("triton", "reference"):
        assert taken(bfloat16, attention=name)["operations"] == f"torch with fused kernels, {name} attention"
    assert "no_kernels" not in taken(bfloat16)


@pytest.mark.usefixtures("_hopper")
def test_what_the_fused_kernels_cannot_compute_is_plain_torchs_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for of, hidden_size, why in (
        (spec(), 64, "the fused kernels run on cuda, not on cpu"),
        (on_cuda(dtype=torch.float64), 64, "the fused kernels do not compute in float64"),
        (on_cuda(), MOST_WIDTH + 1, "rows of 32769 numbers are normed, and 32768 are the most"),
    ):
        line = taken(of, hidden_size, attention="reference")
        assert (line["operations"], line["no_kernels"]) == ("torch, reference attention", why)
    monkeypatch.setattr("executor.operations.fused.find_spec", lambda _: None)
    assert taken(on_cuda(), attention="triton")["no_kernels"] == "triton is not installed"


class NoCompiler:
    def __getitem__(self, grid: object) -> Any:
        raise RuntimeError("Failed to find C compiler. Please specify.\nand so on")


@pytest.mark.usefixtures("_hopper")
def test_where_triton_is_there_and_builds_nothing_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "gate", NoCompiler())
    line = taken(on_cuda(), attention="reference")
    assert line["operations"] == "torch, reference attention"
    assert line["no_kernels"] == (
        "triton cannot build a kernel here (RuntimeError: Failed to find C compiler. Please specify.)"
    )


# --- compilation ----------------------------------------------------------------------------------


def test_kernels_compile_for_hopper_without_contraction() -> None:
    compile_for_hopper("few", 110, "tests.gpu.operation_variants")


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_variant_compiles_for_hopper() -> None:
    compile_for_hopper("all", 850, "tests.gpu.operation_variants")

"""The kernels, in every instruction set that runs here, and plain torch: against float64, and bit by bit."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor.attention.base import AttentionSpec
from executor.attention.reference import ReferenceAttention
from executor.inputs import StepInputs, build_inputs
from executor.kernels import build
from executor.kernels.library import Kernels
from executor.kv_cache import layers_of
from executor.operations.base import Activation, Norm, Operations, StepTensors
from executor.operations.cpu import CpuOperations
from executor.operations.plain import PlainOperations
from executor.plan import SamplingParams
from executor.rows import Row, SampleRow
from tests.executor import attending
from tests.rig import attention_oracle

torch.set_num_threads(1)

SETS = [each.name for each in build.available()]
EVERY_KIND = ["plain", *SETS]
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
"""Number types, and the relative error of a result that is as good as its type."""
either_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
every_kind = pytest.mark.parametrize("kind", EVERY_KIND)
every_set = pytest.mark.parametrize("kind", SETS)


@cache
def kernels(name: str) -> Kernels:
    return Kernels(next(each for each in build.available() if each.name == name), 2)


def spec(dtype: torch.dtype = torch.float32, *, head_dim: int = 32, **others: Any) -> AttentionSpec:
    return attending.spec(dtype=dtype, head_dim=head_dim, **others)


def operations(kind: str, of: AttentionSpec) -> Operations:
    return PlainOperations(ReferenceAttention(of)) if kind == "plain" else CpuOperations(kernels(kind), of)


def random(rng: np.random.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


def rows_in(under_test: Operations, values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` where operations get their rows from: another operation's result."""
    ones = Norm(torch.ones(values.shape[1]), 0.0)
    scale = values.float().pow(2).mean(-1, keepdim=True).sqrt()
    normed = under_test.norm(values.float().contiguous(), ones)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed.float(), values.float() / scale, rtol=1e-2, atol=1e-6)
    return normed


def relative_error(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


def empty_step(num_tokens: int, logits_indices: list[int] | None = None) -> StepTensors:
    """A step that has tokens but no context, for operations that ask for no more."""
    everything = torch.arange(num_tokens)
    chosen = everything if logits_indices is None else torch.tensor(logits_indices)
    return StepTensors(everything, everything, chosen, None)


# --- projections ----------------------------------------------------------------------------------


@every_kind
@either_dtype
@settings(max_examples=15, deadline=None)
@given(
    num_rows=st.integers(1, 70),
    in_features=st.sampled_from([16, 32, 40, 144, 576]),
    out_features=st.sampled_from([16, 24, 96, 130]),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_projections_equal_float64(
    kind: str,
    dtype: torch.dtype,
    num_rows: int,
    in_features: int,
    out_features: int,
    has_bias: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    under_test = operations(kind, spec(dtype))
    weight = random(rng, out_features, in_features, dtype=dtype)
    bias = random(rng, out_features, dtype=dtype) if has_bias else None
    rows = rows_in(under_test, random(rng, num_rows, in_features), dtype)
    expected = rows.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert relative_error(under_test.linear(rows, under_test.pack(weight, bias)), expected) < DTYPES[dtype]


@every_kind
@either_dtype
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("out_features", [16, 40, 128])
def test_gated_projections_equal_float64(
    kind: str, dtype: torch.dtype, activation: Activation, out_features: int
) -> None:
    rng = np.random.default_rng(out_features)
    under_test = operations(kind, spec(dtype))
    weight = random(rng, 2 * out_features, 64, dtype=dtype) / 4
    bias = random(rng, 2 * out_features, dtype=dtype)
    rows = rows_in(under_test, random(rng, 37, 64), dtype)
    sums = rows.double() @ weight.double().T + bias.double()
    gate, up = sums.chunk(2, dim=-1)
    gates = {
        Activation.SILU: torch.nn.functional.silu(gate),
        Activation.GELU_TANH: torch.nn.functional.gelu(gate, approximate="tanh"),
    }
    result = under_test.gated(rows, under_test.pack_gated(weight, bias), activation)
    assert relative_error(result, gates[activation] * up) < 2 * DTYPES[dtype]


@every_kind
@either_dtype
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_logits_are_those_of_the_sampling_rows(kind: str, dtype: torch.dtype, soft_cap: float | None) -> None:
    rng = np.random.default_rng(0)
    under_test = operations(kind, spec(dtype))
    weight = random(rng, 272, 64, dtype=dtype)
    rows = rows_in(under_test, random(rng, 40, 64), dtype)
    logits = under_test.logits(rows, empty_step(40, [3, 39]), under_test.pack(weight, None), soft_cap)
    expected = rows[[3, 39]].double() @ weight.double().T
    if soft_cap is not None:
        expected = soft_cap * torch.tanh(expected / soft_cap)
    assert logits.dtype == torch.float32
    assert relative_error(logits, expected) < DTYPES[dtype]


@every_kind
@either_dtype
def test_embeddings_are_rows_of_the_packed_table(kind: str, dtype: torch.dtype) -> None:
    table = random(np.random.default_rng(0), 272, 40, dtype=dtype)
    of = spec(dtype)
    under_test = operations(kind, of)
    token_ids = [0, 271, 16, 16, 15, 100, 101, 102, 103, 104]
    blocks = np.zeros(len(token_ids), dtype=np.int32)
    row = Row(0, token_ids, 0, blocks, (SampleRow(SamplingParams(max_tokens=1), 0, ()),))
    step = under_test.prepare(build_inputs([row], of.block_size).inputs)
    packed = under_test.pack(table.clone(), None)
    assert torch.equal(under_test.embed(step, packed, 1.0), table[token_ids].float())
    torch.testing.assert_close(under_test.embed(step, packed, 1.5), table[token_ids].float() * 1.5)


@every_kind
@either_dtype
@pytest.mark.parametrize("size", [64, 72, 576])
@pytest.mark.parametrize("norms_update", [False, True])
def test_the_sum_is_kept_and_its_norm_returned(
    kind: str, dtype: torch.dtype, size: int, norms_update: bool
) -> None:
    rng = np.random.default_rng(size)
    under_test = operations(kind, spec(dtype))
    norm, other = Norm(random(rng, size), 1e-5), Norm(random(rng, size), 1e-2)

    def normed(values: Tensor, by: Norm) -> Tensor:
        return values / (values.pow(2).mean(-1, keepdim=True) + by.eps).sqrt() * by.weight.double()

    hidden, update = random(rng, 19, size), random(rng, 19, size, dtype=dtype)
    added = normed(update.double(), other) if norms_update else update.double()
    expected = hidden.double() + added
    result = under_test.add_norm(hidden, update, norm, update_norm=other if norms_update else None)
    assert relative_error(hidden, expected) < DTYPES[torch.float32]
    assert relative_error(result, normed(expected, norm)) < DTYPES[dtype]


# --- attention over the paged cache ---------------------------------------------------------------


class Context:
    """Sequences in a paged cache, written by the operations under test; what is unused is NaN."""

    def __init__(self, kind: str, of: AttentionSpec, seq_lens: list[int], rng: np.random.Generator) -> None:
        self.spec, self.operations = of, operations(kind, of)
        blocks = [-(-seq_len // of.block_size) for seq_len in seq_lens]
        free = rng.permutation(sum(blocks) + 2).astype(np.int32)
        self.tables = np.split(free, np.cumsum(blocks))[: len(blocks)]
        shape = (1, len(free), of.num_kv_heads, 2, of.block_size, of.head_dim)
        (self.cache,) = layers_of(torch.full(shape, torch.nan, dtype=of.dtype))
        self.qkv = random(rng, sum(seq_lens), (of.num_heads + 2 * of.num_kv_heads) * of.head_dim)
        self.seq_lens = seq_lens

    def rows_of(self, parts: list[tuple[int, int, int]]) -> tuple[StepInputs, Tensor]:
        """Tokens `start` to `end` of sequences, as (sequence, start, end): inputs, and their qkv."""
        rows = [
            Row(
                index,
                [0] * (end - start),
                start,
                self.tables[index],
                (SampleRow(SamplingParams(max_tokens=1), 0, ()),),
            )
            for index, start, end in parts
        ]
        offsets = np.cumsum([0, *self.seq_lens])
        ordered = sorted(parts, key=lambda part: part[2] - part[1] > 1)
        places = np.concatenate([np.arange(offsets[i] + s, offsets[i] + e) for i, s, e in ordered])
        return build_inputs(rows, self.spec.block_size).inputs, self.qkv[torch.from_numpy(places)]

    def attended(self, parts: list[tuple[int, int, int]], window: int | None = None) -> Tensor:
        """The parts' keys and values written, their queries attended: `[T, num_heads * head_dim]`."""
        inputs, qkv = self.rows_of(parts)
        step = self.operations.prepare(inputs)
        identity = torch.tensor([1.0, 0.0]).repeat(max(self.seq_lens), 1)[:, :, None]
        query = self.operations.rotate_and_store(
            qkv.to(self.spec.dtype).contiguous(),
            step,
            self.cache,
            rope=identity.repeat(1, 1, self.spec.head_dim // 2).contiguous(),
            query_norm=None,
            key_norm=None,
        )
        return self.operations.attend(query, step, self.cache, window=window).clone()

    def expected(self, parts: list[tuple[int, int, int]], window: int | None = None) -> Tensor:
        """The same in float64, over contexts laid end to end in one block each."""
        of, heads = self.spec, self.spec.num_heads
        longest = max(self.seq_lens)
        keys, values = (np.zeros((len(self.seq_lens), longest, of.num_kv_heads, of.head_dim)) for _ in "kv")
        for index, tokens in enumerate(self.qkv.to(of.dtype).double().split(self.seq_lens)):
            split = tokens.view(len(tokens), -1, of.head_dim).numpy()
            keys[index, : len(tokens)] = split[:, heads : heads + of.num_kv_heads]
            values[index, : len(tokens)] = split[:, heads + of.num_kv_heads :]
        rows = [
            Row(
                i,
                [0] * (end - start),
                start,
                np.array([i]),
                (SampleRow(SamplingParams(max_tokens=1), 0, ()),),
            )
            for i, start, end in parts
        ]
        _, qkv = self.rows_of(parts)
        query = qkv.to(of.dtype).double().view(len(qkv), -1, of.head_dim)[:, :heads].numpy()
        result = attention_oracle.attention(
            query,
            keys,
            values,
            build_inputs(rows, longest).inputs,
            scale=of.scale,
            soft_cap=of.soft_cap,
            window=window,
        )
        return torch.from_numpy(result).flatten(1)


@every_kind
@either_dtype
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 150), st.integers(1, 40)), min_size=1, max_size=4),
    num_kv_heads=st.sampled_from([1, 2, 3]),
    group=st.integers(1, 8),
    head_dim=st.sampled_from([16, 32, 48, 64, 80, 128, 256]),
    block_size=st.sampled_from([1, 3, 8, 16, 24, 64, 256]),
    window=st.sampled_from([None, None, 1, 7, 16, 33]),
    soft_cap=st.sampled_from([None, None, 2.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_attention_equals_float64_and_never_reads_unused_slots(
    kind: str,
    dtype: torch.dtype,
    lengths: list[tuple[int, int]],
    num_kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    soft_cap: float | None,
    seed: int,
) -> None:
    of = spec(
        dtype,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        soft_cap=soft_cap,
    )
    context = Context(kind, of, [seq_len for seq_len, _ in lengths], np.random.default_rng(seed))
    before = [(i, 0, n - q) for i, (n, q) in enumerate(lengths) if n > q]
    if before:
        context.attended(before)
    parts = [(i, max(0, n - q), n) for i, (n, q) in enumerate(lengths)]
    error = relative_error(context.attended(parts, window), context.expected(parts, window))
    assert error < 3 * DTYPES[dtype]


@every_set
@either_dtype
def test_long_contexts_equal_float64(kind: str, dtype: torch.dtype) -> None:
    of = spec(dtype, num_kv_heads=1, group=3, head_dim=64)
    context = Context(kind, of, [5000, 700], np.random.default_rng(3))
    context.attended([(0, 0, 4999), (1, 0, 699)])
    parts = [(0, 4999, 5000), (1, 699, 700)]
    assert relative_error(context.attended(parts), context.expected(parts)) < 3 * DTYPES[dtype]


@every_set
@either_dtype
@pytest.mark.parametrize("side", ["keys", "values"])
def test_a_nan_in_a_context_shows_in_its_own_rows_alone(kind: str, dtype: torch.dtype, side: str) -> None:
    context = Context(kind, spec(dtype), [40, 40], np.random.default_rng(5))
    clean = context.attended([(0, 0, 40), (1, 0, 40)])
    getattr(context.cache, side)[int(context.tables[0][1])] = torch.nan
    again = context.attended([(0, 39, 40), (1, 39, 40)])
    assert again[0].isnan().all()
    assert torch.equal(again[1], clean[79])


@every_kind
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_a_nan_in_a_weight_shows_in_the_logits(kind: str, soft_cap: float | None) -> None:
    under_test = operations(kind, spec())
    weight = torch.ones(64, 32)
    weight[5, 7] = torch.nan
    rows = rows_in(under_test, torch.ones(2, 32), torch.float32)
    logits = under_test.logits(rows, empty_step(2), under_test.pack(weight, None), soft_cap)
    assert logits.isnan().sum(dim=-1).tolist() == [1, 1]


@every_kind
@pytest.mark.parametrize("activation", Activation)
def test_gates_of_any_size_are_finite_and_a_nan_stays_one(kind: str, activation: Activation) -> None:
    under_test = operations(kind, spec())
    weight = torch.zeros(32, 32)
    weight[:8, 0] = torch.tensor([-1e30, -200.0, -88.5, -1.0, 1.0, 88.5, 200.0, torch.nan])
    weight[16:, 0] = 1.0
    rows = torch.zeros(1, 32)
    rows[0, 0] = 1.0
    normed = under_test.norm(rows, Norm(torch.full((32,), 32**-0.5), 0.0))
    result = under_test.gated(normed, under_test.pack_gated(weight, None), activation)[0]
    assert result[:7].isfinite().all()
    assert result[7].isnan()
    assert result[6] == pytest.approx(200.0)


# --- bits -----------------------------------------------------------------------------------------


@every_set
@either_dtype
@pytest.mark.parametrize("in_features", [64, 576, 1536])
@pytest.mark.parametrize("gated", [False, True], ids=["linear", "gated"])
def test_b63_a_row_of_a_projection_has_the_same_bits_in_every_company(
    kind: str, dtype: torch.dtype, in_features: int, gated: bool
) -> None:
    rng = np.random.default_rng(in_features)
    under_test = operations(kind, spec(dtype))
    weight = random(rng, 96, in_features, dtype=dtype)
    hidden = random(rng, 200, in_features)
    ones = Norm(torch.ones(in_features), 1e-5)
    layer = under_test.pack_gated(weight, None) if gated else under_test.pack(weight, None)

    def computed(rows: Tensor) -> Tensor:
        normed = under_test.norm(rows.contiguous(), ones)
        if gated:
            return under_test.gated(normed, layer, Activation.SILU).clone()
        return under_test.linear(normed, layer).clone()

    together = computed(hidden)
    for count in (1, 2, 3, 5, 12, 13, 16, 17, 24, 31, 32, 33, 64, 130):
        start = 200 - count
        assert torch.equal(computed(hidden[start:]), together[start:])


@every_set
@either_dtype
@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=4),
    group=st.sampled_from([1, 3, 8]),
    head_dim=st.sampled_from([16, 64, 80]),
    block_sizes=st.tuples(st.sampled_from([8, 16]), st.sampled_from([5, 32, 64])),
    window=st.sampled_from([None, 9, 40]),
    data=st.data(),
)
def test_b63_attention_has_the_same_bits_in_every_company_chunk_and_block_size(
    kind: str,
    dtype: torch.dtype,
    lengths: list[int],
    group: int,
    head_dim: int,
    block_sizes: tuple[int, int],
    window: int | None,
    data: st.DataObject,
) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1))
    whole, cut = (
        Context(
            kind,
            spec(dtype, group=group, head_dim=head_dim, block_size=block_size),
            lengths,
            np.random.default_rng(seed),
        )
        for block_size in block_sizes
    )
    cut.qkv = whole.qkv
    results: list[list[Tensor]] = [[] for _ in lengths]
    done = [0] * len(lengths)
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        parts = []
        for index, length in enumerate(lengths):
            if done[index] < length and (not parts or data.draw(st.booleans())):
                end = data.draw(st.integers(done[index] + 1, length))
                parts.append((index, done[index], end))
                done[index] = end
        ordered = sorted(parts, key=lambda part: part[2] - part[1] > 1)
        attended = cut.attended(parts, window).split([end - start for _, start, end in ordered])
        for (index, _, _), piece in zip(ordered, attended, strict=True):
            results[index].append(piece)
    for index, length in enumerate(lengths):
        alone = whole.attended([(index, 0, length)], window)
        assert torch.equal(torch.cat(results[index]), alone)


@every_set
def test_the_number_of_threads_changes_no_bit(kind: str) -> None:
    rng = np.random.default_rng(0)
    weight, hidden = random(rng, 960, 576, dtype=torch.bfloat16), random(rng, 100, 576)
    results = []
    for num_threads in (1, 4):
        under_test = CpuOperations(kernels(kind), spec(torch.bfloat16))
        kernels(kind).start(num_threads)
        normed = under_test.norm(hidden, Norm(torch.ones(576), 1e-5))
        results.append(under_test.linear(normed, under_test.pack(weight.clone(), None)).clone())
    assert torch.equal(*results)


# --- choosing -------------------------------------------------------------------------------------


def sample_row(index: int, **params: float) -> SampleRow:
    return SampleRow(SamplingParams(max_tokens=1, seed=index, **params), index, ())  # type: ignore[arg-type]


@every_set
@settings(max_examples=60, deadline=None)
@given(
    temperature=st.sampled_from([0.0, 1e-300, 0.2, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 40, 1500, 10**7]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0]),
    vocab_size=st.sampled_from([1, 5, 272, 1000, 5003]),
    kind_of_logits=st.sampled_from(["spread", "flat", "ties", "masked"]),
    seed=st.integers(0, 1000),
)
def test_tokens_are_chosen_as_torch_chooses_them(
    kind: str,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    vocab_size: int,
    kind_of_logits: str,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    logits = random(rng, 40, vocab_size) * {"spread": 4.0, "flat": 0.0}.get(kind_of_logits, 1.0)
    if kind_of_logits == "ties":
        logits = logits.round()
    if kind_of_logits == "masked":
        logits[:, : vocab_size // 2] = -torch.inf
    rows = [
        sample_row(index, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        for index in range(40)
    ]
    ours, highest = operations(kind, spec()).choose(logits, rows)
    expected, expected_highest = operations("plain", spec()).choose(logits, rows)
    assert highest == expected_highest
    # One draw in millions falls where the rounding of a sum decides.
    assert sum(a != b for a, b in zip(ours, expected, strict=True)) <= (0 if temperature == 0 else 1)
    assert all(logits[index, token] > -torch.inf for index, token in enumerate(ours))


@every_kind
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 17, 271])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_told_by_its_highest_logit_alone(
    kind: str, bad: float, place: int, temperature: float
) -> None:
    logits = random(np.random.default_rng(0), 3, 272)
    rows = [sample_row(index, temperature=temperature) for index in range(3)]
    expected, _ = operations(kind, spec()).choose(logits.clone(), rows)
    logits[1, place] = bad
    chosen, highest = operations(kind, spec()).choose(logits, rows)
    assert [np.isfinite(value) for value in highest] == [True, False, True]
    assert (chosen[0], chosen[2]) == (expected[0], expected[2])


@every_kind
def test_a_row_with_nothing_left_has_minus_infinity_as_its_highest(kind: str) -> None:
    logits = torch.full((1, 272), -torch.inf)
    _, highest = operations(kind, spec()).choose(logits, [sample_row(0, temperature=1.0, top_p=0.5)])
    assert highest == [-np.inf]


@every_set
@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_the_ends_of_the_unit_interval_draw_possible_tokens(
    kind: str, uniform: float, filters: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor.operations.cpu.uniforms", lambda *_: np.array([uniform]))
    logits = torch.full((1, 5000), -torch.inf)
    logits[0, 1000:1300] = 0.1
    chosen, _ = operations(kind, spec()).choose(logits, [sample_row(0, temperature=1.0, **filters)])
    most = 1269 if "top_p" in filters else 1299
    assert chosen == [1000 if uniform == 0 else most]


# --- what is refused ------------------------------------------------------------------------------


def test_head_dims_without_whole_panels_go_another_way() -> None:
    assert "head_dim 24" in str(CpuOperations.refusal(spec(head_dim=24)))
    assert "head_dim 1024" in str(CpuOperations.refusal(spec(head_dim=1024)))
    assert CpuOperations.refusal(spec(head_dim=80)) is None

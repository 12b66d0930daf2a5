"""Parts 3 and 5 of the GPU check: whether attention is right, and how fast it reads the cache."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor.attention.base import AttentionBackend, AttentionSpec
from executor.captured import padded
from executor.inputs import StepInputs, build_inputs
from executor.kernels.library import fastest
from executor.kv_cache import LayerCache, layers_of
from executor.operations.cpu import CpuOperations
from executor.sequences import Row, SamplingParams
from executor.staging import on_device
from tests.gpu.machine import Machine

TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 2e-3, torch.float32: 1e-5}


def rows_on(tables: list[np.ndarray], lengths: list[tuple[int, int]], block_size: int) -> StepInputs:
    """Rows of (query tokens, context) on the blocks of `tables`."""
    params = SamplingParams(max_tokens=1)
    rows = [
        Row(seq_id, [0] * query_len, seq_len - query_len, table.astype(np.int32), params, 0, ())
        for seq_id, ((query_len, seq_len), table) in enumerate(zip(lengths, tables, strict=True), start=1)
    ]
    return build_inputs(rows, block_size).inputs


def random_tables(lengths: list[tuple[int, int]], block_size: int, seed: int) -> tuple[list[np.ndarray], int]:
    """Blocks for each row, and how many there are, two of which nobody has."""
    counts = [-(-seq_len // block_size) for _, seq_len in lengths]
    order = np.random.default_rng(seed).permutation(sum(counts) + 2)
    return np.split(order[: sum(counts)], np.cumsum(counts)[:-1]), len(order)


def expected(query: Tensor, cache: LayerCache, inputs: StepInputs, spec: AttentionSpec) -> Tensor:
    """Attention in float64, row by row."""
    output = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    group = spec.num_heads // spec.num_kv_heads
    for row in range(len(inputs.seq_lens)):
        start, end = (int(each) for each in inputs.query_start_loc[row : row + 2])
        seq_len = int(inputs.seq_lens[row])
        slots = torch.arange(seq_len, device=query.device)
        table = torch.from_numpy(inputs.block_tables[row].astype(np.int64)).to(query.device)
        keys, values = (
            side[table[slots // spec.block_size], slots % spec.block_size].double()
            for side in (cache.keys, cache.values)
        )
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[start:end].double(), keys) * spec.scale
        seen = (
            slots[None, :]
            <= (seq_len - (end - start) + torch.arange(end - start, device=query.device))[:, None]
        )
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        output[start:end] = torch.einsum("hqk,khd->qhd", weights, values)
    return output


@dataclass(frozen=True)
class Kind:
    name: str
    lengths: list[tuple[int, int]]
    num_padding: int = 0
    shares_prefix: bool = False


def kinds(is_small: bool) -> list[Kind]:
    if is_small:
        return [
            Kind("decode", [(1, 33), (1, 5)]),
            Kind("mixed", [(1, 20), (9, 30)]),
            Kind("padded rows", [(1, 20)], num_padding=1),
        ]
    decode = [(1, seq_len) for seq_len in (1, 16, 17, 300, 777, 1000, 64, 255, 256, 257)]
    return [
        Kind("decode", decode),
        Kind("many rows", [(1, 1 + (37 * row) % 400) for row in range(200)]),
        Kind("chunks", [(100, 100), (64, 300), (33, 290), (2, 2)]),
        Kind("mixed", [(1, 700), (1, 30), (100, 612), (5, 5)]),
        Kind("one token", [(1, 1)] * 7),
        Kind("padded rows", [(1, 40), (1, 600), (1, 3)], num_padding=5),
        Kind("shared prefix", [(1, 520), (1, 600), (40, 560)], shares_prefix=True),
    ]


def attended(
    machine: Machine, backend: type[AttentionBackend], spec: AttentionSpec, kind: Kind, unused: float
) -> float:
    """The relative error of one batch; `unused` fills blocks that no row has, tails of blocks are zero."""
    tables, num_blocks = random_tables(kind.lengths, spec.block_size, seed=len(kind.lengths))
    if kind.shares_prefix:
        num_shared = 512 // spec.block_size
        tables = [tables[0][:num_shared], *tables[1:]] if num_shared == 0 else [
            np.concatenate([tables[0][:num_shared], table[num_shared:]]) for table in tables
        ]  # fmt: skip
    inputs = rows_on(tables, kind.lengths, spec.block_size)
    trash = num_blocks
    if kind.num_padding:
        inputs = padded(inputs, len(kind.lengths) + kind.num_padding, trash, spec.block_size)
    generator = torch.Generator(machine.device).manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=machine.device).to(spec.dtype)

    shape = (1, num_blocks + 1, spec.num_kv_heads, 2, spec.block_size, spec.head_dim)
    (cache,) = layers_of(torch.full(shape, unused, dtype=spec.dtype, device=machine.device))
    for side in (cache.keys, cache.values):
        side[trash] = 0.0
        for table, (_, seq_len) in zip(tables, kind.lengths, strict=True):
            for place, block in enumerate(table.tolist()):
                filled = min(spec.block_size, seq_len - place * spec.block_size)
                side[block] = 0.0
                side[block, :filled] = random(filled, spec.num_kv_heads, spec.head_dim)
        if kind.shares_prefix:  # what the last row wrote is what all of them see
            side.nan_to_num_(0.0)
    made = backend(spec)
    metadata = made.prepare(inputs, on_device(inputs, machine.device))
    num_tokens = len(inputs.token_ids)
    fresh = [random(num_tokens, spec.num_kv_heads, spec.head_dim) for _ in range(2)]
    made.write_kv(cache, *fresh, metadata)
    query = random(num_tokens, spec.num_heads, spec.head_dim)
    result = made.forward(query, cache, metadata, window=None).double()
    wanted = expected(query, cache, inputs, spec)
    num_real = len(inputs.token_ids) - kind.num_padding
    return float(
        torch.linalg.norm(result[:num_real] - wanted[:num_real]) / torch.linalg.norm(wanted[:num_real])
    )


def attended_by_kernels(spec: AttentionSpec, kind: Kind) -> float:
    """The relative error of the CPU's own kernels, whose cache only they can write."""
    tables, num_blocks = random_tables(kind.lengths, spec.block_size, seed=1)
    generator = torch.Generator().manual_seed(2)
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    contexts = [torch.randn(seq_len, width, generator=generator) for _, seq_len in kind.lengths]
    operations = CpuOperations(fastest(torch.get_num_threads()), spec)
    most = max(seq_len for _, seq_len in kind.lengths)
    no_turn = torch.tensor([1.0, 0.0])[None, :, None].expand(most, 2, spec.head_dim // 2).contiguous()
    shape = (2, num_blocks, spec.num_kv_heads, 2, spec.block_size, spec.head_dim)
    ours, plain = layers_of(torch.zeros(shape, dtype=spec.dtype))
    attended = query = torch.empty(0)
    inputs = rows_on(tables, kind.lengths, spec.block_size)
    # First all of the contexts, then their last tokens once more, which are the step that is checked.
    for lengths in ([(seq_len, seq_len) for _, seq_len in kind.lengths], kind.lengths):
        step_inputs = rows_on(tables, lengths, spec.block_size)
        decodes_first = sorted(range(len(lengths)), key=lambda row: lengths[row][0] > 1)
        qkv = torch.cat([contexts[row][-lengths[row][0] :] for row in decodes_first]).to(spec.dtype)
        step = operations.prepare(step_inputs)
        query = operations.rotate_and_store(
            qkv, step, ours, rope=no_turn, query_norm=None, key_norm=None
        ).clone()
        heads = qkv.view(len(qkv), -1, spec.head_dim)
        slots = torch.from_numpy(step_inputs.slot_mapping)
        for side, first in ((plain.keys, spec.num_heads), (plain.values, spec.num_heads + spec.num_kv_heads)):
            side[slots // spec.block_size, slots % spec.block_size] = heads[
                :, first : first + spec.num_kv_heads
            ]
        attended = operations.attend(query, step, ours, window=None)
    wanted = expected(query.view(len(query), spec.num_heads, -1), plain, inputs, spec).flatten(1)
    return float(torch.linalg.norm(attended.double() - wanted) / torch.linalg.norm(wanted))


def kernels_error(machine: Machine) -> float:
    spec = machine.spec(64, 2, 3, 16)
    return max(attended_by_kernels(spec, kind) for kind in kinds(is_small=True) if not kind.num_padding)


def correctness(machine: Machine) -> dict[str, Any]:
    """Every back end beside float64."""
    is_small = not machine.is_gpu
    dims, groups, sizes = ([64], [3], [16]) if is_small else ([64, 128], [1, 3, 4], [16, 64, 256])
    worst: dict[str, float] = {}
    failed: list[str] = []
    num_cases = 0
    for head_dim, group, block_size in itertools.product(dims, groups, sizes):
        spec = machine.spec(head_dim, 2, group, block_size)
        for backend, kind, unused in itertools.product(
            machine.backends(spec), kinds(is_small), (0.0, torch.nan)
        ):
            num_cases += 1
            error, why = error_of_case(machine, backend, spec, kind, unused)
            worst[backend.name] = max(worst.get(backend.name, 0.0), error)
            if why is not None:
                failed.append(
                    f"{backend.name} d{head_dim} group {group} block {block_size} {kind.name}: {why}"
                )
    if not machine.is_gpu:
        worst["CPU kernels"] = kernels_error(machine)
        if not worst["CPU kernels"] < TOLERANCE[torch.float32]:
            failed.append(f"CPU kernels: relative error {worst['CPU kernels']:.2e}")
    result = {"cases": num_cases, "worst_error": worst, "failed": failed}
    if failed:
        raise WrongError(f"{len(failed)} of {num_cases} cases, the first: {failed[0]}", result)
    return result


def error_of_case(
    machine: Machine, backend: type[AttentionBackend], spec: AttentionSpec, kind: Kind, unused: float
) -> tuple[float, str | None]:
    """The relative error of one batch, and what is wrong with it; one case stops no other."""
    if machine.is_late:
        return 0.0, "no time was left"
    try:
        error = attended(machine, backend, spec, kind, unused)
    except Exception as failure:  # noqa: BLE001 - see above
        return 0.0, f"{type(failure).__name__}: {failure}"[:300]
    is_good = error < TOLERANCE[spec.dtype]
    return error, None if is_good else f"relative error {error:.2e}, unused slots {unused}"


class WrongError(Exception):
    """A part found something wrong; `result` has what it found."""

    def __init__(self, sentence: str, result: dict[str, Any]) -> None:
        self.result = result
        super().__init__(sentence)


def shapes(machine: Machine) -> Iterator[tuple[int, int, int, int]]:
    """Rows, context, key-value heads, head_dim; the longest last."""
    if not machine.is_gpu:
        yield 2, 32, 1, 64
        return
    for (num_kv_heads, head_dim), num_rows, context in itertools.product(
        ((3, 64), (8, 64), (8, 128)), (32, 128, 256), (500, 1000, 2000)
    ):
        yield num_rows, context, num_kv_heads, head_dim


GROUP = {3: 3, 8: 4, 1: 2}
"""Query heads to a key-value head: SmolLM2's, and Llama 3's."""
COLD_BYTES = 1 << 30
"""Read in turn, so that no layer is in the L2 cache when its turn comes again."""


def bandwidth(machine: Machine, copy_rate: float) -> dict[str, Any]:
    """How fast decode attention reads the cache: bytes of keys and values, as a share of a copy's."""
    measured = []
    for num_rows, context, num_kv_heads, head_dim in shapes(machine):
        for backend in machine.backends(machine.spec(head_dim, num_kv_heads, GROUP[num_kv_heads], 16)) + [
            each
            for each in machine.backends(machine.spec(head_dim, num_kv_heads, GROUP[num_kv_heads], 256))
            if each.name == "flash2"
        ]:
            if machine.is_late or (machine.is_gpu and not backend.can_be_captured):
                continue
            spec = machine.spec(head_dim, num_kv_heads, GROUP[num_kv_heads], backend.block_size)
            try:
                seconds, kv_bytes = layer_seconds(machine, backend, spec, num_rows, context)
            except Exception as failure:  # noqa: BLE001 - one shape stops no other
                measured.append(
                    {"backend": backend.name, "error": f"{type(failure).__name__}: {failure}"[:300]}
                )
                continue
            measured.append(
                {
                    "backend": backend.name, "rows": num_rows, "context": context, "kv_heads": num_kv_heads,
                    "head_dim": head_dim, "kv_mb": round(kv_bytes / 1e6, 1),
                    "us": round(1e6 * seconds, 1), "share_of_copy": round(kv_bytes / seconds / copy_rate, 3),
                }
            )  # fmt: skip
    large = [each for each in measured if each.get("kv_mb", 0) >= 128]
    best: dict[str, float] = {}
    for each in large:
        name = str(each["backend"])
        best[name] = max(best.get(name, 0.0), float(str(each["share_of_copy"])))
    return {"best_share_of_copy_from_128_mb": best, "measured": measured}


def layer_seconds(
    machine: Machine, backend: type[AttentionBackend], spec: AttentionSpec, num_rows: int, context: int
) -> tuple[float, int]:
    """Seconds of one layer's attention in a captured run over many layers, and the bytes that it reads."""
    lengths = [(1, context)] * num_rows
    tables, num_blocks = random_tables(lengths, spec.block_size, seed=0)
    kv_bytes = 2 * num_rows * context * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
    num_layers = max(2, min(64, -(-COLD_BYTES // kv_bytes))) if machine.is_gpu else 2
    shape = (num_layers, num_blocks, spec.num_kv_heads, 2, spec.block_size, spec.head_dim)
    layers = layers_of(torch.zeros(shape, dtype=spec.dtype, device=machine.device))
    inputs = rows_on(tables, lengths, spec.block_size)
    made = backend(spec)
    arrays = on_device(inputs, machine.device)
    query = torch.randn(num_rows, spec.num_heads, spec.head_dim, device=machine.device).to(spec.dtype)

    def work() -> None:
        metadata = made.prepare(inputs, arrays)
        for layer in layers:
            made.forward(query, layer, metadata, window=None)

    if machine.is_gpu:
        graph = machine.accelerator.capture(work)
        seconds = machine.seconds(graph.replay)
    else:
        seconds = machine.seconds(work)
    return seconds / num_layers, kv_bytes

"""Parts 6 and 7 of the GPU check: whether attention is right, and how fast it reads the cache."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from executor.attention.base import AttentionBackend, AttentionSpec
from executor.attention.splits import num_splits
from executor.captured import padded
from executor.inputs import StepInputs, build_inputs
from executor.kernels.library import fastest
from executor.kv_cache import LayerCache, layers_of
from executor.operations.cpu import CpuOperations
from executor.plan import SamplingParams
from executor.rows import Row, SampleRow
from executor.staging import on_device
from tests.gpu.machine import Machine, Report, WrongError

TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 2e-3, torch.float32: 1e-5}
CPU_KERNELS: Final = "CPU kernels"
FORMS: Final = frozenset({"split", "whole", "chunk"})
"""What attention is asked for: decode rows whose contexts are cut, decode rows whose are not, and chunks."""


def rows_on(tables: list[np.ndarray], lengths: list[tuple[int, int]], block_size: int) -> StepInputs:
    """Rows of (query tokens, context) on the blocks of `tables`."""
    params = SamplingParams(max_tokens=1)
    rows = [
        Row(seq_id, [0] * query_len, seq_len - query_len, table.astype(np.int32), (SampleRow(params, 0, ()),))
        for seq_id, ((query_len, seq_len), table) in enumerate(zip(lengths, tables, strict=True), start=1)
    ]
    return build_inputs(rows, block_size).inputs


def random_tables(lengths: list[tuple[int, int]], block_size: int, seed: int) -> tuple[list[np.ndarray], int]:
    """Blocks for each row, and how many there are, two of which nobody has."""
    counts = [-(-seq_len // block_size) for _, seq_len in lengths]
    order = np.random.default_rng(seed).permutation(sum(counts) + 2)
    return np.split(order[: sum(counts)], np.cumsum(counts)[:-1]), len(order)


def expected(
    query: Tensor, cache: LayerCache, inputs: StepInputs, spec: AttentionSpec, window: int | None = None
) -> Tensor:
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
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        own = (seq_len - (end - start) + torch.arange(end - start, device=query.device))[:, None]
        seen = slots[None, :] <= own
        if window is not None:
            seen &= slots[None, :] > own - window
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        output[start:end] = torch.einsum("hqk,khd->qhd", weights, values)
    return output


@dataclass(frozen=True)
class Kind:
    """Rows of a step: each one's query tokens and context."""

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
        Kind("many rows", [(1, 1 + (37 * row) % 400) for row in range(300)]),
        Kind("chunks", [(100, 100), (64, 300), (33, 290), (2, 2)]),
        Kind("mixed", [(1, 700), (1, 30), (100, 612), (5, 5)]),
        Kind("one token", [(1, 1)] * 7),
        Kind("padded rows", [(1, 40), (1, 600), (1, 3)], num_padding=5),
        Kind("shared prefix", [(1, 520), (1, 600), (40, 560)], shares_prefix=True),
    ]


@dataclass(frozen=True)
class Case:
    spec: AttentionSpec
    kind: Kind
    window: int | None = None
    unused: float = torch.nan
    """what is in blocks that no row has"""
    tails: float = 0.0
    """what is in a row's last block behind the end of its context"""

    @property
    def name(self) -> str:
        spec = self.spec
        return (
            f"{str(spec.dtype).removeprefix('torch.')} d{spec.head_dim} "
            f"group {spec.num_heads // spec.num_kv_heads} block {spec.block_size}"
            + (f" window {self.window}" if self.window is not None else "")
            + (f" soft cap {spec.soft_cap}" if spec.soft_cap is not None else "")
            + f" {self.kind.name}, unused {self.unused}, tails {self.tails}"
        )

    @property
    def forms(self) -> set[str]:
        lengths = [query_len for query_len, _ in self.kind.lengths] + [1] * self.kind.num_padding
        num_decodes = lengths.count(1)
        found = {"chunk"} if num_decodes < len(lengths) else set()
        if num_decodes:
            found.add("split" if num_splits(num_decodes, self.spec.num_kv_heads) > 1 else "whole")
        return found


def cases(machine: Machine, backend: type[AttentionBackend]) -> list[Case]:
    """What a back end is tried with, of what it serves; first what there is little of."""
    is_small = not machine.is_gpu
    head_dim, group = (64, 3) if is_small else (128, 4)
    found: list[Case] = []
    few = [kind for kind in kinds(is_small) if kind.name in ({"mixed"} if is_small else {"decode", "mixed"})]
    both = [(37, 30.0)]
    for window, soft_cap in both if is_small else [(37, None), (None, 30.0), *both]:
        spec = machine.spec(head_dim, 2, group, backend.block_size, window=window, soft_cap=soft_cap)
        found += [Case(spec, kind, window) for kind in few]
    for dtype in () if is_small else (torch.float32, torch.float16):
        spec = machine.spec(head_dim, 2, group, backend.block_size, dtype)
        found += [Case(spec, kind) for kind in few]
    spec = machine.spec(head_dim, 2, group, backend.block_size)
    found += [Case(spec, kind, tails=torch.nan) for kind in few]
    dims, groups, sizes = ([64], [3], [16]) if is_small else ([64, 128], [1, 3, 4], [16, 64, 256])
    for head_dim, group, block_size in itertools.product(dims, groups, sizes):
        spec = machine.spec(head_dim, 2, group, block_size)
        found += [
            Case(spec, kind, unused=unused)
            for kind, unused in itertools.product(
                kinds(is_small), (torch.nan,) if is_small else (0.0, torch.nan)
            )
        ]
    return [each for each in found if machine.refusals(each.spec)[backend.name] is None]


def attended(machine: Machine, backend: type[AttentionBackend], case: Case) -> float:
    """The relative error of one batch."""
    spec, kind = case.spec, case.kind
    tables, num_blocks = random_tables(kind.lengths, spec.block_size, seed=len(kind.lengths))
    if kind.shares_prefix:
        num_shared = 512 // spec.block_size
        tables = [np.concatenate([tables[0][:num_shared], table[num_shared:]]) for table in tables]
    inputs = rows_on(tables, kind.lengths, spec.block_size)
    trash = num_blocks
    if kind.num_padding:
        inputs = padded(inputs, len(kind.lengths) + kind.num_padding, trash, spec.block_size)
    generator = torch.Generator(machine.device).manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=machine.device).to(spec.dtype)

    def there(numbers: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(numbers)).to(machine.device)

    shape = (1, num_blocks + 1, spec.num_kv_heads, 2, spec.block_size, spec.head_dim)
    (cache,) = layers_of(torch.full(shape, case.unused, dtype=spec.dtype, device=machine.device))
    contexts = [np.arange(seq_len) for _, seq_len in kind.lengths]
    blocks = there([table[each // spec.block_size] for table, each in zip(tables, contexts, strict=True)])
    offsets = there([each % spec.block_size for each in contexts])
    for side in (cache.keys, cache.values):
        side[trash] = 0.0
        side[there(tables)] = case.tails
        side[blocks, offsets] = random(len(blocks), spec.num_kv_heads, spec.head_dim)
    made = backend(spec)
    metadata = made.prepare(inputs, on_device(inputs, machine.device))
    num_tokens = len(inputs.token_ids)
    fresh = [random(num_tokens, spec.num_kv_heads, spec.head_dim) for _ in range(2)]
    made.write_kv(cache, *fresh, metadata)
    query = random(num_tokens, spec.num_heads, spec.head_dim)
    result = made.forward(query, cache, metadata, window=case.window).double()
    wanted = expected(query, cache, inputs, spec, case.window)
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


def kernels(machine: Machine) -> dict[str, Any]:
    """The CPU's own kernels beside float64."""
    spec = machine.spec(64, 2, 3, 16)
    tried = [kind for kind in kinds(is_small=True) if not kind.num_padding]
    error = max(attended_by_kernels(spec, kind) for kind in tried)
    result = {"cases": len(tried), "worst_error": {"float32": error}, "failed": []}
    if not error < TOLERANCE[torch.float32]:
        raise WrongError(f"{CPU_KERNELS}: relative error {error:.2e}", result)
    return result


def correctness(machine: Machine, backend: type[AttentionBackend], report: Report) -> dict[str, Any]:
    """A back end beside float64."""
    worst: dict[str, float] = {}
    failed: list[str] = []
    spread: list[str] = []
    left = cases(machine, backend)
    forms: set[str] = set()
    result: dict[str, Any] = {"cases": 0, "worst_error": worst, "failed": failed, "not_run": []}
    while left and not machine.is_late:
        case = left.pop(0)
        report(result | {"under_way": case.name})
        result["cases"] += 1
        forms |= case.forms
        try:
            error = attended(machine, backend, case)
        except Exception as failure:  # noqa: BLE001 - one case stops no other, but for one that loses the device
            failed.append(f"{case.name}: {type(failure).__name__}: {failure}"[:300])
            if machine.is_lost:
                break
            continue
        dtype = str(case.spec.dtype).removeprefix("torch.")
        if error < TOLERANCE[case.spec.dtype]:
            worst[dtype] = max(worst.get(dtype, 0.0), error)
        elif backend.needs_clean_tails and case.tails != 0:
            spread.append(case.name)
        else:
            worst[dtype] = math.inf if math.isnan(error) else max(worst.get(dtype, 0.0), error)
            failed.append(f"{case.name}: relative error {error:.2e}")
    result |= {"forms": sorted(forms), "not_run": [case.name for case in left]}
    if backend.needs_clean_tails:
        result["nan_in_tails"] = f"is carried into other rows ({spread[0]})" if spread else "does no harm"
    if machine.is_gpu and not left and (missing := FORMS - forms):
        failed.append(f"never asked for: {', '.join(sorted(missing))}")
    if failed:
        raise WrongError(f"{len(failed)} of {result['cases']} cases, the first: {failed[0]}", result)
    return result


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
LARGE_BYTES = 128_000_000
"""Below it the limit is not bandwidth."""
COLD_BYTES = 1 << 30
"""Read in turn, so that no layer is in the L2 cache when its turn comes again."""


def bandwidth(
    machine: Machine, backend: type[AttentionBackend], copy_rate: float, report: Report
) -> dict[str, Any]:
    """How fast decode attention reads the cache: bytes of keys and values, as a share of a copy's."""
    measured: list[dict[str, Any]] = []
    best = 0.0
    result: dict[str, Any] = {"best_share_of_copy_from_128_mb": best, "measured": measured, "not_run": []}
    for num_rows, context, num_kv_heads, head_dim in shapes(machine):
        shape = {"rows": num_rows, "context": context, "kv_heads": num_kv_heads, "head_dim": head_dim}
        if machine.is_late:
            result["not_run"].append(shape)
            continue
        spec = machine.spec(head_dim, num_kv_heads, GROUP[num_kv_heads], backend.block_size)
        try:
            seconds, kv_bytes = layer_seconds(machine, backend, spec, num_rows, context)
        except Exception as failure:  # noqa: BLE001 - one shape stops no other
            measured.append(shape | {"error": f"{type(failure).__name__}: {failure}"[:300]})
            if machine.is_lost:
                break
            continue
        share = kv_bytes / seconds / copy_rate
        measured.append(
            shape
            | {
                "kv_mb": round(kv_bytes / 1e6, 1),
                "us": round(1e6 * seconds, 1),
                "share_of_copy": round(share, 3),
            }
        )
        if kv_bytes >= LARGE_BYTES:
            best = max(best, share)
            result["best_share_of_copy_from_128_mb"] = round(best, 3)
        report(result)
    if errors := [each["error"] for each in measured if "error" in each]:
        raise WrongError(f"{len(errors)} shapes could not be measured, the first: {errors[0]}", result)
    return result


def layer_seconds(
    machine: Machine, backend: type[AttentionBackend], spec: AttentionSpec, num_rows: int, context: int
) -> tuple[float, int]:
    """Seconds of one layer's attention in a captured run over many layers, and the bytes that it reads."""
    lengths = [(1, context)] * num_rows
    tables, num_blocks = random_tables(lengths, spec.block_size, seed=0)
    kv_bytes = 2 * num_rows * context * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
    num_layers = max(2, min(64, -(-COLD_BYTES // kv_bytes))) if machine.is_gpu else 2
    shape = (num_layers, num_blocks, spec.num_kv_heads, 2, spec.block_size, spec.head_dim)
    # Random numbers: zeros draw less power than what is ever served.
    layers = layers_of(torch.empty(shape, dtype=spec.dtype, device=machine.device).normal_())
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

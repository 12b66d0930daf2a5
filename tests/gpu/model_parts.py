"""Parts 3 to 5 of the GPU check: captured steps, the sampler, and a whole step of a large model."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor import late_sampler, sampler
from executor.adjustments import adjustment_of
from executor.attention.base import AttentionBackend
from executor.captured import CapturedDecode, padded
from executor.inputs import StepBatch, StepInputs, build_inputs
from executor.kv_cache import KVCache
from executor.model.config import LayerKind, ModelConfig, Rope
from executor.model.decoder import Decoder
from executor.model.weights import LayerWeights, ModelWeights
from executor.operations.base import Linear, Mlp, Norm
from executor.operations.fused import FusedOperations
from executor.operations.plain import PlainOperations
from executor.philox import philox4x32
from executor.pipeline import Pipeline
from executor.plan import SamplingParams
from executor.rows import IN_FLIGHT, Row, SampleRow
from executor.selection import BACKENDS
from executor.staging import Staging, StepArrays, arrays_of
from tests.gpu.filters_part import kernel_or_why
from tests.gpu.machine import Machine, Report, WrongError

SMALL = {"num_layers": 2, "hidden": 64, "mlp": 128, "vocab": 272, "heads": 2, "kv_heads": 1, "head_dim": 32}
MIDDLE = {
    "num_layers": 4,
    "hidden": 1024,
    "mlp": 2816,
    "vocab": 32000,
    "heads": 16,
    "kv_heads": 4,
    "head_dim": 64,
}
LARGE = {
    "num_layers": 32, "hidden": 4096, "mlp": 14336, "vocab": 128256, "heads": 32, "kv_heads": 8, "head_dim":
    128,
}  # fmt: skip
"""The shape of Llama 3 8B."""
MOST_TOKENS = 4096
"""Of a sequence."""
STEP = (256, 1000)
"""Rows of the step that is timed, and each one's context."""
EVERYTHING = SamplingParams(
    max_tokens=9,
    temperature=0.9,
    top_p=0.9,
    top_k=50,
    seed=3,
    logprobs=3,
    repetition_penalty=1.1,
    frequency_penalty=0.2,
)


class Model:
    """A decoder with random weights, over a cache with room for `num_blocks`."""

    def __init__(
        self, machine: Machine, backend: type[AttentionBackend], shape: dict[str, int], num_blocks: int
    ) -> None:
        self.machine = machine
        self.config = ModelConfig(
            vocab_size=shape["vocab"], hidden_size=shape["hidden"], intermediate_size=shape["mlp"],
            num_heads=shape["heads"], num_kv_heads=shape["kv_heads"], head_dim=shape["head_dim"],
            max_seq_len=MOST_TOKENS if machine.is_gpu else 64,
            layers=(LayerKind(Rope(5e5)),) * shape["num_layers"], rms_norm_eps=1e-5,
            tie_word_embeddings=False, attention_scale=shape["head_dim"] ** -0.5,
        )  # fmt: skip
        config = self.config
        spec = machine.spec(
            config.head_dim, config.num_kv_heads, config.num_heads // config.num_kv_heads, backend.block_size
        )
        self.block_size = spec.block_size
        is_fused = FusedOperations.refusal(spec, config.hidden_size) is None
        self.operations = (FusedOperations if is_fused else PlainOperations)(backend(spec))
        self._generator = torch.Generator(machine.device).manual_seed(0)
        hidden, dim = config.hidden_size, config.head_dim
        norm = Norm(torch.ones(hidden, device=machine.device), config.rms_norm_eps)
        self.num_weight_bytes = 0
        self.flops_per_row = 0

        def layer() -> LayerWeights:
            return LayerWeights(
                attention_norm=norm, query_norm=None, key_norm=None, attention_update_norm=None,
                mlp_norm=norm, mlp_update_norm=None,
                qkv=self._linear((config.num_heads + 2 * config.num_kv_heads) * dim, hidden),
                attention_out=self._linear(hidden, config.num_heads * dim),
                mlp=Mlp(
                    self._gated(2 * config.intermediate_size, hidden),
                    self._linear(hidden, config.intermediate_size),
                ),
            )  # fmt: skip

        layers = tuple(layer() for _ in config.layers)
        head = self._linear(config.vocab_size, hidden)
        embeddings = self.operations.pack(self._random(config.vocab_size, hidden), None)
        weights = ModelWeights(embeddings, layers, norm, head, None, "random", self.num_weight_bytes)
        self.decoder = Decoder(config, weights, self.operations)
        self.cache = KVCache(
            config,
            num_blocks=num_blocks,
            block_size=self.block_size,
            dtype=machine.dtype,
            device=machine.device,
        )

    def _random(self, rows: int, columns: int) -> Tensor:
        made = torch.randn(
            rows, columns, generator=self._generator, device=self.machine.device, dtype=self.machine.dtype
        )
        return made.mul_(columns**-0.5)

    def _counted(self, rows: int, columns: int) -> Tensor:
        weight = self._random(rows, columns)
        self.num_weight_bytes += weight.nbytes
        self.flops_per_row += 2 * rows * columns
        return weight

    def _linear(self, rows: int, columns: int) -> Linear:
        return self.operations.pack(self._counted(rows, columns), None)

    def _gated(self, rows: int, columns: int) -> Linear:
        return self.operations.pack_gated(self._counted(rows, columns), None)

    def captured(self, sizes: tuple[int, ...]) -> CapturedDecode:
        return CapturedDecode(
            self.machine.accelerator, self.decoder, self.operations, self.cache, sizes=sizes,
            max_seq_len=self.config.max_seq_len,
        )  # fmt: skip

    def decode_step(
        self, lengths: list[int], seed: int, params: SamplingParams, *, in_flight: bool = False
    ) -> StepBatch:
        rng = np.random.default_rng(seed)
        free = list(rng.permutation(self.cache.num_blocks))
        rows = []
        for seq_id, length in enumerate(lengths, start=1):
            blocks = np.array([free.pop() for _ in range(-(-length // self.block_size))], dtype=np.int32)
            token_id = IN_FLIGHT if in_flight else int(rng.integers(self.config.vocab_size))
            adjustment = adjustment_of(params, (1, 2, 3), (4,))
            rows.append(Row(seq_id, [token_id], length - 1, blocks, (SampleRow(params, 1, (), adjustment),)))
        return build_inputs(rows, self.block_size)


PLANS = ([900, 3, 77, 300, 1], [5, 600, 16], [1000] * 8, [2])
"""Lengths of the rows' contexts."""


@torch.inference_mode()
def graphs(machine: Machine, backend: type[AttentionBackend], report: Report) -> dict[str, Any]:
    """Some plans through one capture, beside the same steps operation by operation."""
    model = Model(machine, backend, MIDDLE, num_blocks=2 * 8192 // backend.block_size)
    captured = model.captured((1, 2, 4, 8, 16))
    found: dict[str, Any] = {"worst_difference": 0.0, "same_bits": True, "not_run": []}
    for seed, lengths in enumerate(PLANS):
        if machine.is_late:
            found["not_run"].append(lengths)
            continue
        batch = model.decode_step(lengths, seed, SamplingParams(max_tokens=1))
        size = captured.size_for(batch.inputs)
        assert size is not None
        inputs = padded(batch.inputs, size, model.cache.trash_block_id, model.block_size)
        arrays = arrays_on(machine, inputs)
        replayed = captured.run(arrays, size)[: len(lengths)].float().clone()
        eager = model.decoder.forward(inputs, model.cache).normed[: len(lengths)].float()
        difference = float((replayed - eager).abs().max() / eager.abs().max())
        # A NaN is the worst of all.
        found["worst_difference"] = max(found["worst_difference"], np.nan_to_num(difference, nan=np.inf))
        found["same_bits"] &= replayed.equal(eager)
        if not difference < 1e-2:
            raise WrongError(f"a replayed step differs by {difference:.2e} from an eager one", found)
        report(found)
    return found


def arrays_on(machine: Machine, inputs: StepInputs) -> StepArrays:
    """A step's arrays on the device."""
    return StepArrays(**Staging(machine.accelerator).put(arrays_of(inputs)))


def philox_on(device: torch.device, counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox4x32-10 in the device's integers: products of 32 bits in halves, for int64 has a sign."""
    c = [torch.from_numpy(counter[:, i].astype(np.int64)).to(device) for i in range(4)]
    k = [torch.from_numpy(key[:, i].astype(np.int64)).to(device) for i in range(2)]
    mask = 0xFFFFFFFF

    def product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
        low = a * (b & 0xFFFF)
        high = a * (b >> 16)
        total = low + ((high & 0xFFFF) << 16)
        return ((high >> 16) + (total >> 32)) & mask, total & mask

    for _ in range(10):
        high0, low0 = product(0xD2511F53, c[0])
        high1, low1 = product(0xCD9E8D57, c[2])
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return torch.stack(c, dim=1).cpu().numpy().astype(np.uint64)


@torch.inference_mode()
def sampling(machine: Machine, report: Report) -> dict[str, Any]:
    """Integers, tokens, and that a step waits for nothing."""
    rng = np.random.default_rng(0)
    counter, key = (rng.integers(0, 2**32, (1000, n)).astype(np.uint64) for n in (4, 2))
    if not (philox_on(machine.device, counter, key) == philox4x32(counter, key)).all():
        raise WrongError("Philox's integers differ between the host and the device", {})
    options: list[dict[str, Any]] = [
        {"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}, {"top_p": 0.8, "top_k":
        100}, {"repetition_penalty": 1.3, "frequency_penalty": 0.5}, {"logit_bias": ((7, 5.0),),
        "banned_token_ids": frozenset({1, 2})},
    ]  # fmt: skip
    rows = []
    for index in range(256 if machine.is_gpu else 16):
        params = SamplingParams(max_tokens=9, seed=index, logprobs=2, **options[index % len(options)])
        rows.append(SampleRow(params, index, (), adjustment_of(params, (1, 2, 3), (4, 4))))
    logits = torch.from_numpy(
        rng.standard_normal((len(rows), 50_000 if machine.is_gpu else 2_000)) * 3
    ).float()
    wishes = late_sampler.wishes(rows, [False] * len(rows), logits.shape[1])
    there = Staging(machine.accelerator).put(wishes.arrays)
    last = torch.zeros(len(rows), dtype=torch.int64, device=machine.device)
    kernel = kernel_or_why(machine)
    filter_rows = late_sampler.filter_by_sorting if isinstance(kernel, str) else kernel
    parts = late_sampler.chosen(logits.to(machine.device), last, there, 2, filter_rows)
    late = late_sampler.sampled({name: part.cpu().numpy() for name, part in parts.items()}, wishes)
    known = sampler.sample(logits.clone(), rows)
    different = sum(a != b for a, b in zip(late.token_ids, known.token_ids, strict=True))
    result: dict[str, Any] = {"rows": len(rows), "different_from_cpu": different}
    report(result)
    # Float64 sums of another order part them where a number stands at a boundary: one row in millions.
    if different > 1:
        raise WrongError(f"{different} of {len(rows)} rows chose another token than on the CPU", result)
    result["waits_in_a_step"], result["not_run"] = waits(machine, launched_ahead(machine))
    waiting = {name: why for name, why in result["waits_in_a_step"].items() if why != "none"}
    if waiting:
        raise WrongError(f"something in a step waits for the device, or fails: {waiting}", result)
    return result


def launched_ahead(machine: Machine) -> list[type[AttentionBackend]]:
    """Back ends whose steps are launched ahead; without a GPU one that is quick."""
    found = [
        backend
        for backend in BACKENDS
        if machine.refusals(machine.spec(64, 4, 4, backend.block_size))[backend.name] is None
    ]
    return [each for each in found if each.can_be_captured] if machine.is_gpu else found[-1:]


def waits(machine: Machine, backends: Sequence[type[AttentionBackend]]) -> tuple[dict[str, str], list[str]]:
    """What in a step of each back end waited for the device, and those there was no time for."""
    found: dict[str, str] = {}
    not_run: list[str] = []
    for backend in backends:
        if machine.is_late:
            not_run.append(backend.name)
            continue
        try:
            launch_some(machine, backend)
            found[backend.name] = "none"
        except Exception as failure:  # noqa: BLE001 - torch says by one that something waits
            found[backend.name] = f"{type(failure).__name__}: {failure}"[:300]
    return found, not_run


def launch_some(machine: Machine, backend: type[AttentionBackend]) -> None:
    """Steps, each fed by the one before; raises when one of them waits for the device."""
    shape = MIDDLE if machine.is_gpu else SMALL
    model = Model(machine, backend, shape, num_blocks=512 if machine.is_gpu else 16)
    captured = model.captured((1, 2, 4, 8)) if machine.is_gpu else None
    pipeline = Pipeline(
        machine.accelerator, model.decoder, model.operations, model.cache, vocab_size=model.config.vocab_size,
        captured=captured,
    )  # fmt: skip
    lengths = [5, 3]
    launched = [pipeline.launch(model.decode_step(lengths, 0, EVERYTHING), _never)]
    for _ in range(3):  # so that everything was allocated once
        batch = model.decode_step(lengths, 0, EVERYTHING, in_flight=True)
        launched.append(pipeline.launch(batch, _never))
    machine.synchronize()
    if machine.is_gpu:
        torch.cuda.set_sync_debug_mode("error")
    try:
        launched.append(pipeline.launch(model.decode_step(lengths, 0, EVERYTHING, in_flight=True), _never))
    finally:
        if machine.is_gpu:
            torch.cuda.set_sync_debug_mode("default")
    for each in launched:
        output = pipeline.collect(each)
        assert len(output.sampled.token_ids) == len(lengths)


def _never() -> None:
    raise AssertionError("no row is constrained")


SAMPLED = {
    "with_sampling_ms": {"temperature": 1.0},
    "with_top_p_ms": {"temperature": 1.0, "top_p": 0.9},
    "with_logprobs_ms": {"temperature": 1.0, "logprobs": 5},
}
"""What each row of a timed step asks for."""


@torch.inference_mode()
def whole_step(
    machine: Machine, backend: type[AttentionBackend], copy_rate: float, flop_rate: float, report: Report
) -> dict[str, Any]:
    """A decode step of a large model in milliseconds: eager, captured, with sampling; and the least it takes.

    Figures that there was no time for are named in `not_run`.
    """
    num_rows, context = STEP if machine.is_gpu else (2, 20)
    per_row = -(-(context + 1) // backend.block_size)
    model = Model(machine, backend, LARGE if machine.is_gpu else SMALL, num_blocks=num_rows * per_row)
    config = model.config
    kv_row = 2 * config.num_kv_heads * config.head_dim * context * machine.dtype.itemsize
    kv_seconds = num_rows * kv_row * config.num_layers / copy_rate
    product_seconds = max(model.num_weight_bytes / copy_rate, num_rows * model.flops_per_row / flop_rate)
    floor = 1e3 * (kv_seconds + product_seconds)
    found: dict[str, Any] = {"floor_ms": round(floor, 3), "not_run": []}
    for name, measured in step_times(machine, model, num_rows, context).items():
        if machine.is_late:
            found["not_run"].append(name)
            continue
        found[name] = round(1e3 * measured(), 3)
        if name in {"eager_ms", "captured_ms"}:
            found["times_the_floor"] = round(found[name] / floor, 3)
        report(found)
    return found


def step_times(machine: Machine, model: Model, num_rows: int, context: int) -> dict[str, Callable[[], float]]:
    """What is measured, in this order, by its name: seconds of a step."""

    def step_of(wishes: dict[str, Any]) -> StepBatch:
        return model.decode_step([context] * num_rows, 0, SamplingParams(max_tokens=9, seed=1, **wishes))

    plain = step_of({})
    arrays = arrays_on(machine, plain.inputs)
    captured: list[CapturedDecode] = []

    def eager() -> float:
        def work() -> None:
            step = model.operations.arrange(plain.inputs, arrays)
            model.decoder.head(model.decoder.layers(step, model.cache))

        return machine.seconds(work, times=3, warm_ups=1)

    def replayed() -> float:
        captured.append(model.captured((num_rows,)))
        hidden = model.decoder.layers(model.operations.arrange(plain.inputs, arrays), model.cache)

        def work() -> None:
            captured[0].run(arrays, num_rows)
            model.decoder.head(hidden)

        return machine.seconds(work)

    def served(wishes: dict[str, Any]) -> float:
        batch = step_of(wishes)
        pipeline = Pipeline(
            machine.accelerator, model.decoder, model.operations, model.cache,
            vocab_size=model.config.vocab_size, captured=captured[0] if captured else None,
        )  # fmt: skip

        def work() -> None:
            pipeline.launch(batch, _never)

        return machine.seconds(work, times=3, warm_ups=1)

    timed: dict[str, Callable[[], float]] = {"eager_ms": eager}
    if machine.is_gpu:
        timed["captured_ms"] = replayed
    return timed | {name: partial(served, wishes) for name, wishes in SAMPLED.items()}

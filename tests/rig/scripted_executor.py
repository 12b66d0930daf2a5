"""A real gRPC executor with a script in place of the model.

The whole protocol side is the executor's own (`executor.servicer`, session, sequences, inputs); only the
runner is replaced. Its "KV cache" holds the token id of every slot, and it reads each context back through
the block tables: a scheduler that mixes up blocks or positions gets wrong tokens, as from a real model.

Without a script the next token is a hash of the whole context, never an end token: a function of the sequence
alone, whatever the batch, the chunks, the blocks or the executor. A request's script gives ids or logits by
output index.

    script = Script(max_num_seqs=4, requests=(RequestScript(prompt=(1, 2), token_ids=(7, 8, 257)),))
    with running(script, tmp_path) as executor:
        ...  executor.address, executor.steps(), executor.kill()
"""

import argparse
import contextlib
import json
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from executor import servicer, serving
from executor.device import Fingerprints, StepOutput, StepTimings
from executor.inputs import StepInputs
from executor.plan import BatchPlan, NewSequence, PromptLogprobs, SamplingParams, StepResult, TokenLogprobs
from executor.rows import PromptStretch, Sampled, SampleRow
from executor.work import EpochWork
from rpc import log, server
from rpc.settings import ServiceSettings
from tests.rig.service_process import ServiceProcess

NAN_SENTENCE = "the model's logits for this sequence are not numbers"


@dataclass(frozen=True, slots=True)
class RequestScript:
    """What one request gets. Output past what is given goes on with the hash of the context.

    Attributes:
        prompt: ids of the prompt it is for; None takes the next request (in order of admission) that no other
            script is for.
        token_ids: the output, by output index.
        logits: in place of `token_ids`, one row for each output index; sampled by the executor's own sampler.
            A row shorter than the vocabulary is filled up with -inf.
        row_errors: sentence of the error that ends the request at an output index.
        deadly: the process dies, as by kill -9, of each step that would sample a token of it.
    """

    prompt: tuple[int, ...] | None = None
    token_ids: tuple[int, ...] = ()
    logits: tuple[tuple[float, ...], ...] = ()
    row_errors: dict[int, str] = field(default_factory=dict)
    deadly: bool = False


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong in one step, counted from 1 over the life of the process; only steps with rows count.

    Kinds: `die` (the process ends as by kill -9), `stall` (the step takes `seconds` more), `fail` (the device
    raises), `nan` (the first sampling row's logits are no numbers).
    """

    at_step: int
    kind: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Script:
    """Capacity, speed, failures and requests of a scripted executor."""

    num_blocks: int = 1024
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    max_seq_len: int = 8192
    vocab_size: int = 272
    eos_token_ids: tuple[int, ...] = (257, 259)
    window: int = 2
    row_invariant: bool = True
    load_seconds: float = 0.0
    step_seconds: float = 0.0
    token_seconds: float = 0.0
    """Time of a step: `step_seconds` and this for each of its tokens."""
    model_fingerprint: str = "scripted"
    tokenizer_fingerprint: str = ""
    features: tuple[str, ...] = ("logprobs", "prompt_logprobs")
    """What is told. Scripted logits are sampled with penalties, bias and lists; scripted ids are not."""
    memory: int = 0
    """How many tokens of its context the model looks at, 0 for all: with few it soon repeats itself."""
    draws: bool = False
    """Whether ids that are not scripted are drawn, from logits that a hash of the context gives."""
    requests: tuple[RequestScript, ...] = ()
    faults: tuple[Fault, ...] = ()
    log_path: str = ""
    """Where each step's line goes; empty for none."""

    def next_token(self, context: Sequence[int], excluded: frozenset[int]) -> int:
        """The token after `context`: a hash of it, and never an excluded id."""
        ids = np.asarray(context[-self.memory :], dtype=np.int64)
        token_id = zlib.crc32(ids.tobytes()) % self.vocab_size
        if self.memory:
            token_id = ord("a") + token_id % 8
        while token_id in excluded:
            token_id = (token_id + 1) % self.vocab_size
        return token_id

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Script":
        """The script written by `to_json`, or by hand: unknown names raise TypeError."""
        raw = json.loads(text)
        requests = tuple(
            RequestScript(
                prompt=None if entry.get("prompt") is None else tuple(entry["prompt"]),
                token_ids=tuple(entry.get("token_ids", ())),
                logits=tuple(tuple(row) for row in entry.get("logits", ())),
                row_errors={int(index): text for index, text in entry.get("row_errors", {}).items()},
                deadly=entry.get("deadly", False),
            )
            for entry in raw.pop("requests", ())
        )
        faults = tuple(Fault(**entry) for entry in raw.pop("faults", ()))
        eos_token_ids = tuple(raw.pop("eos_token_ids", cls().eos_token_ids))
        features = tuple(raw.pop("features", cls().features))
        return cls(requests=requests, faults=faults, eos_token_ids=eos_token_ids, features=features, **raw)


# --- the tests' side --------------------------------------------------------------------------------


def expected_output(prompt: Sequence[int], num_tokens: int, script: Script | None = None) -> list[int]:
    """What an unscripted request gets: the oracle for ids."""
    script = script or Script()
    context = list(prompt)
    for _ in range(num_tokens):
        context.append(script.next_token(context, frozenset(script.eos_token_ids)))
    return context[len(prompt) :]


class ScriptedExecutor(ServiceProcess):
    """The process, and what it logged."""

    def __init__(
        self, script_path: Path, script: Script, listen: str, *flags: str, fresh: bool = False
    ) -> None:
        self._script = script
        given = ("--script", str(script_path), "--listen", listen, *flags)
        super().__init__("tests.rig.scripted_executor", *given, fresh=fresh)

    def steps(self) -> list[dict[str, Any]]:
        """One entry for each step that ran so far: see `_LoggingWork`. Needs `log_path` in the script."""
        path = Path(self._script.log_path)
        *lines, _ = path.read_text().split("\n") if path.exists() else [""]  # the last may not be whole yet
        return [json.loads(line) for line in lines]


@contextlib.contextmanager
def running(
    script: Script, folder: Path, *, name: str = "executor", listen: str | None = None, wait: bool = True
) -> Iterator[ScriptedExecutor]:
    """A scripted executor on a Unix socket in `folder`, its steps logged there; ended with the block."""
    if not script.log_path:
        values = {f.name: getattr(script, f.name) for f in fields(script)}
        script = Script(**{**values, "log_path": str(folder / f"{name}.steps.jsonl")})
    script_path = folder / f"{name}.script.json"
    script_path.write_text(script.to_json())
    process = ScriptedExecutor(script_path, script, listen or f"unix:{folder}/{name}.sock")
    try:
        if wait:
            process.wait_until_serving()
        yield process
    finally:
        process.close()


# --- the process' side ------------------------------------------------------------------------------


class ScriptedRunner:
    """The runner: a token id in each slot in place of keys and values."""

    dtype = "float32"
    device = "scripted"
    matcher_of = None
    pipeline = None

    def __init__(self, script: Script) -> None:
        self._script = script
        self.num_blocks = script.num_blocks
        self.block_size = script.block_size
        self.max_seq_len = script.max_seq_len
        self.vocab_size = script.vocab_size
        self.eos_token_ids = script.eos_token_ids
        self.row_invariant = script.row_invariant
        self.features = script.features
        self.fingerprints = Fingerprints(script.model_fingerprint, script.tokenizer_fingerprint, "scripted")
        self._slots = np.full(script.num_blocks * script.block_size, -1, dtype=np.int64)
        self._num_steps = 0
        self._faults = {fault.at_step: fault for fault in script.faults}
        self._unclaimed = [request for request in script.requests if request.prompt is None]
        self._by_prompt = {
            request.prompt: request for request in script.requests if request.prompt is not None
        }
        # A sequence comes back after a preemption under another seq_id: prompt and seed name its request.
        self._claimed: dict[tuple[tuple[int, ...], int], RequestScript] = {}

    def warm_up(self) -> None:
        """Nothing to warm."""

    def work_ahead(self) -> bool:
        """Nothing to do."""
        return False

    def admit(self, new: NewSequence) -> None:
        """Find the script of a sequence, in order of admission."""
        prompt = new.token_ids[: new.num_prompt_tokens]
        key = (prompt, new.params.seed)
        if key in self._claimed:
            return
        if prompt in self._by_prompt:
            self._claimed[key] = self._by_prompt[prompt]
        elif self._unclaimed:
            self._claimed[key] = self._unclaimed.pop(0)

    def step(self, inputs: StepInputs, sample_rows: Sequence[SampleRow]) -> StepOutput:
        started = time.perf_counter_ns()
        self._num_steps += 1
        fault = self._faults.get(self._num_steps)
        seconds = self._script.step_seconds + self._script.token_seconds * len(inputs.token_ids)
        if seconds:  # sleeping for nothing gives the processor away all the same
            time.sleep(seconds)
        if fault is not None:
            _bring_about(fault)
        self._slots[inputs.slot_mapping] = inputs.token_ids
        rows = np.searchsorted(inputs.query_start_loc, inputs.logits_indices, side="right") - 1
        lengths = inputs.positions[inputs.logits_indices] + 1
        contexts = [self._context(inputs, int(row), int(n)) for row, n in zip(rows, lengths, strict=True)]
        forwarded = time.perf_counter_ns()
        sampled = [self._sample(context, row) for context, row in zip(contexts, sample_rows, strict=True)]
        if fault is not None and fault.kind == "nan" and sampled:
            sampled[0] = (0, None, NAN_SENTENCE)
        ended = time.perf_counter_ns()
        return StepOutput(
            Sampled([s[0] for s in sampled], [s[1] for s in sampled], [s[2] for s in sampled]),
            [_prompt_logprobs(scored.stretch) for scored in inputs.scored],
            (forwarded - started) // 1000,
            (ended - forwarded) // 1000,
        )

    def _context(self, inputs: StepInputs, row: int, length: int) -> tuple[int, ...]:
        positions = np.arange(length)
        blocks = inputs.block_tables[row, positions // self.block_size].astype(np.int64)
        context = self._slots[blocks * self.block_size + positions % self.block_size]
        assert (context >= 0).all(), "the context has a slot that no step has written"
        return tuple(context.tolist())

    def _sample(
        self, context: tuple[int, ...], row: SampleRow
    ) -> tuple[int, TokenLogprobs | None, str | None]:
        prompt = context[: len(context) - row.output_index]
        request = self._claimed.get((prompt, row.params.seed), RequestScript())
        if request.deadly:
            os.kill(os.getpid(), 9)
        if row.output_index in request.row_errors:
            return 0, None, request.row_errors[row.output_index]
        if row.output_index < len(request.logits):
            return self._sample_logits(request.logits[row.output_index], row)
        if self._script.draws:
            return self._sample_logits(_hashed_logits(context, self.vocab_size), row)
        excluded = frozenset(row.masked_ids) | frozenset(self.eos_token_ids)
        if (
            row.output_index < len(request.token_ids)
            and request.token_ids[row.output_index] not in row.masked_ids
        ):
            token_id = request.token_ids[row.output_index]
        else:
            token_id = self._script.next_token(context, excluded)
        return token_id, _certain(token_id, row.params), None

    def _sample_logits(
        self, logits: tuple[float, ...], row: SampleRow
    ) -> tuple[int, TokenLogprobs | None, str | None]:
        import torch  # two seconds that only scripts with logits pay

        from executor import sampler

        padded = torch.full((1, self.vocab_size), -torch.inf)
        padded[0, : len(logits)] = torch.tensor(logits, dtype=torch.float32)
        sampled = sampler.sample(padded, [row])
        return sampled.token_ids[0], sampled.logprobs[0], sampled.errors[0]


def _hashed_logits(context: tuple[int, ...], vocab_size: int) -> tuple[float, ...]:
    """Logits in which no two are alike, after this context."""
    ids = np.asarray(context, dtype=np.int64)
    return tuple(np.random.default_rng(zlib.crc32(ids.tobytes())).normal(size=vocab_size, scale=3.0).tolist())


def _certain(token_id: int, params: SamplingParams) -> TokenLogprobs | None:
    """A given token has probability 1, so it has no alternatives but itself."""
    if params.logprobs is None:
        return None
    top = (token_id,) if params.logprobs > 0 else ()
    return TokenLogprobs(token_id, 0.0, 1, top, (0.0,) * len(top))


def _prompt_logprobs(stretch: PromptStretch) -> PromptLogprobs:
    """A token of a prompt has minus its position, so that one in the wrong place shows."""
    reports = []
    for position, token_id in enumerate(stretch.token_ids, stretch.first_position):
        top = (token_id,) if stretch.num_top > 0 else ()
        reports.append(TokenLogprobs(token_id, -float(position), 1, top, (-float(position),) * len(top)))
    return PromptLogprobs(stretch.seq_id, stretch.first_position, reports)


def _bring_about(fault: Fault) -> None:
    if fault.kind == "die":
        os.kill(os.getpid(), 9)
    elif fault.kind == "stall":
        time.sleep(fault.seconds)
    elif fault.kind == "fail":
        raise RuntimeError("scripted failure of the device")
    elif fault.kind != "nan":
        raise ValueError(f"no such kind of fault: {fault.kind}")


class _LoggingWork(EpochWork):
    """Tells the runner of admissions, and writes one line for each step.

    A line: epoch, step_id, acked_step_id, rows [[seq_id, num_tokens]], num_tokens (their sum), admitted
    [[seq_id, known tokens, prompt tokens, computed tokens]], released, grown [[seq_id, new blocks]], sampled
    {seq_id: [ids]}, finished [[seq_id, reason]], errors [seq_id], seconds (a monotonic clock).
    """

    runner: ScriptedRunner
    log: TextIO | None = None

    def execute(self, plan: BatchPlan) -> tuple[StepResult, StepTimings]:
        for new in plan.admitted:
            self.runner.admit(new)
        result, timings = super().execute(plan)
        if self.log is not None:
            self.log.write(json.dumps(_line(plan, result)) + "\n")
            self.log.flush()
        return result, timings


def _line(plan: BatchPlan, result: StepResult) -> dict[str, Any]:
    sampled: dict[int, list[int]] = {}
    start = 0
    for seq_id, count in zip(result.seq_ids, result.num_sampled, strict=True):
        sampled[seq_id] = list(result.token_ids[start : start + count])
        start += count
    return {
        "epoch": plan.epoch,
        "step_id": plan.step_id,
        "acked_step_id": plan.acked_step_id,
        "rows": list(zip(plan.seq_ids, plan.num_tokens, strict=True)),
        "num_tokens": sum(plan.num_tokens),
        "admitted": [
            [new.seq_id, len(new.token_ids), new.num_prompt_tokens, new.num_computed_tokens]
            for new in plan.admitted
        ],
        "released": list(plan.released_seq_ids),
        "grown": list(zip(plan.grown_seq_ids, plan.num_new_blocks, strict=True)),
        "sampled": sampled,
        "finished": [[ended.seq_id, ended.reason.value] for ended in result.finished],
        "errors": [error.seq_id for error in result.errors],
        "seconds": time.monotonic(),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="scripted executor")
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--grace-seconds", type=float, default=10.0)
    parser.add_argument("--metrics-listen", default="")
    parser.add_argument("--log-level", default="info")
    flags = parser.parse_args(argv)
    script = Script.from_json(flags.script.read_text())
    runner = ScriptedRunner(script)
    _LoggingWork.runner = runner
    if script.log_path:
        # Open to the end of the process; a restarted executor goes on in the same file.
        _LoggingWork.log = Path(script.log_path).open("a", encoding="utf-8")  # noqa: SIM115 - see above
    vars(servicer)["EpochWork"] = _LoggingWork  # the one seam that the servicer does not offer

    def load() -> ScriptedRunner:
        time.sleep(script.load_seconds)
        return runner

    async def serve() -> int:
        log.configure("executor", fmt="console", level=flags.log_level)
        code, _ = await serving.serve(
            ServiceSettings(
                listen=flags.listen, grace_seconds=flags.grace_seconds, metrics_listen=flags.metrics_listen
            ),
            load,
            max_num_seqs=script.max_num_seqs,
            token_budget=lambda _: script.max_num_batched_tokens,
            max_window=script.window,
        )
        return code

    server.main("scripted executor", serve)


if __name__ == "__main__":
    main()

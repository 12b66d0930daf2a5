"""The GPU check's script, on the CPU: the reference alone, for the interpreter is slow."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.attention.base import AttentionMetadata, metadata_of
from executor.attention.paged_triton import TritonAttention
from executor.attention.reference import ReferenceAttention
from executor.inputs import StepInputs
from executor.kv_cache import LayerCache
from executor.staging import StepArrays
from tests.gpu import attention_parts, check, machine, model_parts, parts, variants
from tests.gpu.check import PARTS, Check
from tests.gpu.machine import Machine, WrongError
from tests.rig.fake_device import FakeDevice

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="`python -m tests.gpu.check` is for a GPU")


@pytest.fixture(autouse=True)
def _no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "interpreter_refusal", lambda: "the interpreter is slow")


ROOT = str(Path(__file__).parents[2])


def nobody(_: dict[str, Any]) -> None:
    """Nobody wants to know what was found so far."""


def seen_from_a_gpu() -> Machine:
    """A machine that says what would be tried on a GPU."""
    return Machine(FakeDevice(device=torch.device("cuda")))


# --- the parts ------------------------------------------------------------------------------------------


def found_by(folder: Path, *arguments: str) -> dict[tuple[str, str | None], dict[str, Any]]:
    assert check.main(["--json", str(folder / "found.json"), *arguments]) == 0
    units = json.loads((folder / "found.json").read_text())
    return {(unit["part"], unit["backend"]): unit for unit in units}


def test_all_parts_run_without_a_gpu(tmp_path: Path) -> None:
    found = found_by(tmp_path, "--part", *PARTS)
    assert {name: unit["verdict"] for name, unit in found.items()} == {
        ("environment", None): "good",
        ("rates", None): "good",
        ("operations", None): "good",
        ("filters", None): "good",
        ("sampling", None): "good",
        ("executor", None): "good",
        ("whole step", "reference"): "good",
        ("attention", "reference"): "good",
        ("attention", "CPU kernels"): "good",
        ("bandwidth", "reference"): "good",
    }
    environment = found["environment", None]["found"]
    assert environment["is_gpu"] is False
    assert environment["refused"]["block 16"]["flash3"] == "it runs on cuda, not on cpu"
    assert found["sampling", None]["found"]["different_from_cpu"] == 0
    step = found["whole step", "reference"]["found"]
    assert {"eager_ms", "with_sampling_ms", "with_top_p_ms", "with_logprobs_ms"} <= set(step)
    assert step["times_the_floor"] > 0, "the rates are known to the parts behind them"


def test_rates_that_were_measured_before_are_given(tmp_path: Path) -> None:
    rates = ["--copy-rate", "1e9", "--flop-rate", "1e9"]
    found = found_by(tmp_path, "--part", "whole step", "--backend", "reference", *rates)
    step = found["whole step", "reference"]["found"]
    assert step["times_the_floor"] == pytest.approx(step["eager_ms"] / step["floor_ms"], rel=0.05)


def test_a_part_that_breaks_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> dict[str, Any]:
        raise RuntimeError("no such kernel")

    def is_wrong(*_: object) -> dict[str, Any]:
        raise WrongError("two tokens differ", {"different": 2})

    monkeypatch.setattr(attention_parts, "correctness", lambda *_: {"not_run": ["decode"]})
    monkeypatch.setattr(parts, "rates", breaks)
    monkeypatch.setattr(model_parts, "sampling", is_wrong)
    found = found_by(tmp_path, "--part", "rates", "sampling", "attention", "--backend", "reference")
    assert [unit["verdict"] for unit in found.values()] == ["BROKEN", "WRONG", "unfinished"]
    assert found["rates", None]["why"] == "RuntimeError: no such kernel"
    assert found["sampling", None]["found"] == {"different": 2}


def test_what_was_found_so_far_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    findings = parts.Findings(Machine.here(60.0), path)

    def work(report: machine.Report) -> dict[str, Any]:
        report({"cases": 1})
        (written,) = json.loads(path.read_text())
        assert written == {"part": "attention", "backend": "triton", "found": {"cases": 1}}
        return {"cases": 2}

    findings.unit({"part": "attention", "backend": "triton"}, work)
    (written,) = json.loads(path.read_text())
    assert (written["verdict"], written["found"]) == ("good", {"cases": 2})


def test_what_there_was_no_time_for_is_neither_good_nor_wrong(tmp_path: Path) -> None:
    found = found_by(tmp_path, "--part", *PARTS, "--seconds", "0")
    assert {unit["verdict"] for unit in found.values()} == {"not run"}
    late = Machine.here(-1.0)
    result = attention_parts.correctness(late, ReferenceAttention, nobody)
    assert (result["cases"], result["failed"]) == (0, [])
    assert len(result["not_run"]) == len(attention_parts.cases(late, ReferenceAttention))
    step = model_parts.whole_step(late, ReferenceAttention, 1e9, 1e9, nobody)
    assert step["not_run"] == ["eager_ms", "with_sampling_ms", "with_top_p_ms", "with_logprobs_ms"]
    assert attention_parts.bandwidth(late, ReferenceAttention, 1e9, nobody)["not_run"]
    assert model_parts.sampling(late, nobody)["not_run"] == ["reference"]


class OffByLittle(ReferenceAttention):
    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        return super().forward(*args, **options) * 1.001


def test_wrong_attention_is_found() -> None:
    with pytest.raises(WrongError, match=r"relative error 1\.00e-03") as raised:
        attention_parts.correctness(Machine.here(60.0), OffByLittle, nobody)
    assert len(raised.value.result["failed"]) == raised.value.result["cases"]


class Breaking(ReferenceAttention):
    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("an illegal memory access was encountered")


def test_a_device_that_is_lost_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Machine.here(60.0)
    num_cases = len(attention_parts.cases(here, Breaking))
    with pytest.raises(WrongError) as raised:
        attention_parts.correctness(here, Breaking, nobody)
    assert raised.value.result["cases"] == num_cases
    monkeypatch.setattr(Machine, "is_lost", True)
    with pytest.raises(WrongError, match=r"1 of 1 cases, the first: .*illegal memory access") as raised:
        attention_parts.correctness(here, Breaking, nobody)
    assert len(raised.value.result["not_run"]) == num_cases - 1


class MultipliesTails(ReferenceAttention):
    """As FlashAttention 3: slots behind the end of a context count, times zero."""

    def forward(
        self, query: torch.Tensor, cache: LayerCache, metadata: Any, *, window: int | None
    ) -> torch.Tensor:
        tails = cache.values[metadata.block_tables[:, :1].long()].sum() * 0.0
        return super().forward(query, cache, metadata, window=window) + tails


class NeedsCleanTails(MultipliesTails):
    needs_clean_tails = True


def test_nan_behind_the_end_of_a_context_is_told_of_who_needs_zeros_there_and_wrong_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = attention_parts.Kind("mixed", [(1, 5), (3, 9)])
    monkeypatch.setattr(attention_parts, "kinds", lambda _: [short])
    here = Machine.here(60.0)
    found = attention_parts.correctness(here, NeedsCleanTails, nobody)
    assert found["nan_in_tails"].startswith("is carried into other rows")
    with pytest.raises(WrongError, match="tails nan: relative error nan"):
        attention_parts.correctness(here, MultipliesTails, nobody)
    assert "nan_in_tails" not in attention_parts.correctness(here, ReferenceAttention, nobody)


def gpu_cases() -> list[attention_parts.Case]:
    return attention_parts.cases(seen_from_a_gpu(), TritonAttention)


def test_on_a_gpu_every_form_type_and_mask_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "refusals", lambda _, spec: {"triton": TritonAttention.refusal(spec)})
    tried = gpu_cases()
    assert set.union(*(case.forms for case in tried)) == attention_parts.FORMS
    masks = {(case.window, case.spec.soft_cap) for case in tried}
    assert masks == {(None, None), (37, None), (None, 30.0), (37, 30.0)}
    assert all(case.spec.has_window == (case.window is not None) for case in tried)
    assert {case.spec.dtype for case in tried} == {torch.bfloat16, torch.float16, torch.float32}
    assert {case.tails != 0 for case in tried} == {True, False}


def test_a_form_that_no_case_has_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "refusals", lambda _, spec: {"triton": TritonAttention.refusal(spec)})
    monkeypatch.setattr(attention_parts, "attended", lambda *_: 0.0)
    attention_parts.correctness(seen_from_a_gpu(), TritonAttention, nobody)
    few = [kind for kind in attention_parts.kinds(is_small=False) if kind.name != "many rows"]
    monkeypatch.setattr(attention_parts, "kinds", lambda _: few)
    with pytest.raises(WrongError, match="never asked for: whole"):
        attention_parts.correctness(seen_from_a_gpu(), TritonAttention, nobody)


def test_the_kernels_that_are_compiled_without_a_gpu_are_those_of_the_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Machine, "refusals", lambda _, spec: {"triton": TritonAttention.refusal(spec)})
    wanted = {
        variants.Variant(
            case.spec.dtype, case.spec.head_dim, case.spec.block_size, form,
            has_window=case.window is not None, has_soft_cap=case.spec.soft_cap is not None,
        )
        for case in gpu_cases() for form in case.forms
    }  # fmt: skip
    assert wanted <= set(variants.ALL)


def test_every_back_end_is_asked_whether_its_steps_wait() -> None:
    found, not_run = model_parts.waits(Machine.here(60.0), [Breaking, ReferenceAttention, OffByLittle])
    assert found == {"reference": "none"}
    assert not_run == []


class Dense(ReferenceAttention):
    """Decode rows over whole tables, masked: it can be captured."""

    can_be_captured = True

    def prepare(self, inputs: StepInputs, arrays: StepArrays) -> AttentionMetadata:
        return metadata_of(inputs, arrays, self.spec.block_size)

    def forward(
        self, query: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata, *, window: int | None
    ) -> torch.Tensor:
        tables, (num_rows, num_heads, head_dim) = metadata.block_tables.long(), query.shape
        keys, values = (
            side[tables].flatten(1, 2).repeat_interleave(num_heads // self.spec.num_kv_heads, dim=2)
            for side in (cache.keys, cache.values)
        )
        scores = torch.einsum("rhd,rnhd->rhn", query, keys) * self.spec.scale
        behind = torch.arange(keys.shape[1]) >= metadata.seq_lens[:, None]
        weights = scores.masked_fill(behind[:, None], -torch.inf).softmax(dim=-1)
        return torch.einsum("rhn,rnhd->rhd", weights, values).view(num_rows, num_heads, head_dim)


class Stale(Dense):
    """Keeps what it was captured with: whatever is replayed, the contexts are those of the capture."""

    def prepare(self, inputs: StepInputs, arrays: StepArrays) -> AttentionMetadata:
        metadata = super().prepare(inputs, arrays)
        return replace(metadata, seq_lens=torch.from_numpy(inputs.seq_lens.copy()))


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts do what they do on a GPU, with a device that only seems one."""
    small = model_parts.SMALL
    for name in ("MIDDLE", "LARGE"):
        monkeypatch.setattr(model_parts, name, small)
    monkeypatch.setattr(model_parts, "PLANS", ([60, 3, 17], [5], [33] * 9))
    monkeypatch.setattr(model_parts, "STEP", (3, 40))
    monkeypatch.setattr(Machine, "is_gpu", True)
    monkeypatch.setattr(Machine, "dtype", torch.float32)
    monkeypatch.setattr(Machine, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: None)

    def seconds(_: Machine, work: Callable[[], None], **__: int) -> float:
        work()
        return 0.001

    monkeypatch.setattr(Machine, "seconds", seconds)
    monkeypatch.setattr(model_parts, "MOST_TOKENS", 64)


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_replayed_steps_are_compared_and_one_that_is_stale_is_wrong() -> None:
    here = Machine.here(60.0)
    found = model_parts.graphs(here, Dense, nobody)
    assert found == {"worst_difference": 0.0, "same_bits": True, "not_run": []}
    with pytest.raises(WrongError, match="a replayed step differs by"):
        model_parts.graphs(here, Stale, nobody)


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_captured_steps_are_timed_and_fed_ones_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Machine.here(60.0)
    found = model_parts.whole_step(here, Dense, 1e9, 1e9, nobody)
    assert {"eager_ms", "captured_ms", "with_sampling_ms"} <= set(found)
    assert model_parts.waits(here, [Dense]) == ({"reference": "none"}, [])
    monkeypatch.setattr(attention_parts, "COLD_BYTES", 1)
    monkeypatch.setattr(attention_parts, "shapes", lambda _: [(2, 40, 1, 64)])
    (measured,) = attention_parts.bandwidth(here, Dense, 1e9, nobody)["measured"]
    assert measured["us"] == 500, "of one of two layers"


# --- the process that runs them -------------------------------------------------------------------------

CHILD = """
import json, os, subprocess, sys, time
arguments = sys.argv[1:]
def after(flag):
    values = []
    for each in arguments[arguments.index(flag) + 1:] if flag in arguments else []:
        if each.startswith("--"):
            break
        values.append(each)
    return values
(path,), parts, backends = after("--json"), after("--part"), after("--backend")
folder = os.path.dirname(os.path.abspath(__file__))
with open(folder + "/started", "a") as started:
    started.write(" ".join(arguments[arguments.index("--seconds") + 2:]) + "\\n")
units = []
def write():
    with open(path, "w") as file:
        json.dump(units, file)
plans = json.load(open(folder + "/plans.json"))
for part in parts:
    for backend in backends if part in ("graphs", "whole step", "attention", "bandwidth") else [None]:
        unit = {"part": part, "backend": backend}
        units.append(unit)
        plan = plans.get(f"{part} {backend}") or plans.get(part) or {"found": {"a": 1}}
        unit["found"] = plan.get("found", {})
        write()
        if "say" in plan:
            print(plan["say"], file=sys.stderr, flush=True)
        if plan.get("abort"):
            os.kill(os.getpid(), 6)
        if plan.get("hang"):
            asleep = subprocess.Popen(["sleep", "100"])
            with open(folder + "/asleep", "w") as file:
                file.write(str(asleep.pid))
            time.sleep(100)
        unit.update({"verdict": plan.get("verdict", "good"), "seconds": 0.1})
        write()
"""
GPU = {"environment": {"found": {"is_gpu": True, "backends": {
    "graphs": ["flash3", "triton"], "whole step": ["triton"], "attention": ["triton"],
    "bandwidth": ["triton"],
}}}}  # fmt: skip
RATES = {"rates": {"found": {"copy_bytes_per_second": 4e12, "flops_per_second": 7e14}}}
FOUND = {"found": {"cases": 3, "worst_error": {}, "failed": [], "measured": []}}
"""Of the last parts, whose figures are printed."""


def checked(
    folder: Path, plans: dict[str, Any], seconds: float = 100.0, builder: Sequence[str] = ()
) -> tuple[bool, dict[str, Any]]:
    (folder / "child.py").write_text(CHILD)
    usual = GPU | RATES | {"attention": FOUND, "bandwidth": FOUND}
    (folder / "plans.json").write_text(json.dumps(usual | plans))
    command = [sys.executable, "-I", "-S", str(folder / "child.py")]
    is_good = Check(seconds, folder / "all.json", command, builder).run()
    return is_good, json.loads((folder / "all.json").read_text())["parts"]


def test_each_part_and_back_end_is_a_process_that_knows_the_rates(tmp_path: Path) -> None:
    is_good, found = checked(tmp_path, {})
    assert is_good
    assert {part: told["verdict"] for part, told in found.items()} == dict.fromkeys(PARTS, "good")
    rates = "--copy-rate 4000000000000.0 --flop-rate 700000000000000.0 "
    assert (tmp_path / "started").read_text().splitlines() == [
        "--part environment",
        "--part rates",
        f"{rates}--part operations",
        f"{rates}--part filters",
        f"{rates}--part graphs --backend flash3",
        f"{rates}--part graphs --backend triton",
        f"{rates}--part sampling",
        f"{rates}--part executor",
        f"{rates}--part whole step --backend triton",
        f"{rates}--part attention --backend triton",
        f"{rates}--part bandwidth --backend triton",
    ]


def test_a_process_that_dies_or_hangs_stops_no_other_and_what_it_had_found_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(check.MOST_SECONDS, "attention", 1.0)
    monkeypatch.setattr(check, "LEAST_SECONDS", 0.1)
    plans = {
        "graphs flash3": {"abort": True, "say": "CUDA error: an illegal memory access", "found": {"b": 2}},
        "attention": FOUND | {"hang": True},
    }
    is_good, found = checked(tmp_path, plans)
    assert not is_good
    graphs = found["graphs"]
    assert graphs["verdict"] == graphs["backends"]["flash3"]["verdict"] == "BROKEN"
    assert graphs["backends"]["triton"]["verdict"] == "good"
    dead, hung = graphs["backends"]["flash3"], found["attention"]["backends"]["triton"]
    assert dead["why"] == "it was ended by signal 6, SIGABRT"
    assert dead["trace"] == "CUDA error: an illegal memory access\n"
    assert dead["found"] == {"b": 2}
    assert hung["why"] == "it was not done after 1 s, and was ended"
    assert hung["found"]["cases"] == 3
    assert found["bandwidth"]["verdict"] == "good"
    # With it went what it had started.
    await_end(int((tmp_path / "asleep").read_text()))
    said = capsys.readouterr().out
    assert "graphs, flash3           BROKEN" in said
    assert "copy 4.00 TB/s, product 700 Tflop/s" in said


BUILDER = """
import os, sys, time
folder, of_all, share, number = sys.argv[1:]
with open(f"{folder}/built {share} of {number}", "w") as file:
    file.write(str(os.getpid()))
time.sleep(100)
"""


def test_kernels_are_compiled_beside_the_parts_and_that_ends_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "NUM_BUILDERS", 2)
    (tmp_path / "builder.py").write_text(BUILDER)
    builder = [sys.executable, "-I", "-S", str(tmp_path / "builder.py"), str(tmp_path)]
    is_good, _ = checked(tmp_path, {}, builder=builder)
    assert is_good
    begun = [tmp_path / f"built {share} of 2" for share in range(2)]
    pids = [int(each.read_text()) for each in begun if each.exists()]
    assert pids, "the parts take longer than a start"
    assert not any(is_running(pid) for pid in pids)
    no_gpu = {"environment": {"found": {"is_gpu": False, "backends": {}}}}
    for each in begun:
        each.unlink(missing_ok=True)
    checked(tmp_path, no_gpu, builder=builder)
    assert not any(each.exists() for each in begun)


def test_each_kernel_is_in_one_share() -> None:
    shares = [variants.wanted(["all", str(share), "8"]) for share in range(8)]
    assert sorted(each.name for share in shares for each in share) == sorted(
        each.name for each in variants.ALL
    )
    assert variants.wanted(["all"]) == variants.ALL
    assert variants.wanted(["few"]) == variants.FEW


def await_end(pid: int) -> None:
    deadline = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


ENDED = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.gpu import check
check.missing = lambda: None
made = check.Check
check.Check = lambda seconds, path, *_, **__: made(seconds, path, [sys.executable, "-I", "-S", sys.argv[2]])
sys.exit(check.main([]))
"""


def test_who_ends_the_check_ends_what_it_runs(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "plans.json").write_text(json.dumps({"environment": {"hang": True}}))
    asleep = tmp_path / "asleep"
    command = [sys.executable, "-I", "-S", "-c", ENDED, ROOT, str(tmp_path / "child.py")]
    with subprocess.Popen(command) as process:
        deadline = time.monotonic() + 20
        while not (asleep.exists() and asleep.read_text()) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.terminate()
        assert process.wait(20) == 128 + 15
    await_end(int(asleep.read_text()))


def test_the_file_is_whole_after_each_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    write = Check.write

    def written(self: Check) -> None:
        write(self)
        states.append(list(json.loads((tmp_path / "all.json").read_text())["parts"]))

    monkeypatch.setattr(Check, "write", written)
    checked(tmp_path, {})
    assert [len(parts) for parts in states] == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10]


def test_when_time_is_up_nothing_is_begun(tmp_path: Path) -> None:
    is_good, found = checked(tmp_path, {}, seconds=0.0)
    assert is_good, "nothing is wrong"
    told = [each for part in found.values() for each in part.get("backends", {"": part}).values()]
    assert {each["verdict"] for each in told} == {"not run"}
    assert not (tmp_path / "started").exists()


def test_without_a_gpu_all_the_rest_is_one_process(tmp_path: Path) -> None:
    small = {
        "is_gpu": False,
        "backends": {part: ["reference"] for part in GPU["environment"]["found"]["backends"]},
    }
    small["backends"]["graphs"] = []  # type: ignore[index]
    is_good, found = checked(
        tmp_path, {"environment": {"found": small}, "attention": FOUND | {"abort": True}}
    )
    assert not is_good
    assert len((tmp_path / "started").read_text().splitlines()) == 2
    assert found["graphs"]["why"] == "no back end here is made for it"
    assert found["whole step"]["verdict"] == "good"
    assert found["attention"]["verdict"] == "BROKEN"
    assert found["bandwidth"]["verdict"] == "not run"


def test_it_imports_nothing_that_may_be_missing_and_names_what_is() -> None:
    script = "from tests.gpu.check import main; sys.exit(main([]))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, sys.argv.pop()); {script}", ROOT],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("The check needs llguidance, numpy, structlog, torch; not installed here: ")
    assert "pip install llguidance numpy structlog torch" in done.stderr
    assert done.stderr.count("\n") == 1

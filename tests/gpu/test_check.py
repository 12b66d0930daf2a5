"""The GPU check's script, on the CPU: the reference alone, for the interpreter is slow."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.attention.reference import ReferenceAttention
from tests.gpu import attention_parts, check, machine, model_parts
from tests.gpu.attention_parts import WrongError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="`python -m tests.gpu.check` is for a GPU")

PARTS = ["environment", "rates", "attention", "graphs", "sampling", "whole step", "bandwidth"]


@pytest.fixture(autouse=True)
def _no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "interpreter_refusal", lambda: "the interpreter is slow")


def run(tmp_path: Path) -> tuple[int, dict[str, Any]]:
    code = check.main(["--json", str(tmp_path / "found.json")])
    found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())
    return code, found


def test_all_parts_run_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run(tmp_path)
    verdicts = {name: part["verdict"] for name, part in found["parts"].items()}
    assert verdicts == dict.fromkeys(PARTS, "good")
    assert code == 0
    assert found["is_gpu"] is False
    assert found["parts"]["environment"]["found"]["refused"]["flash3"] == "it runs on cuda, not on cpu"
    assert found["parts"]["sampling"]["found"]["different_from_cpu"] == 0
    assert "its figures mean nothing" in capsys.readouterr().out


def test_a_part_that_breaks_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> dict[str, Any]:
        raise RuntimeError("no such kernel")

    def is_wrong(*_: object) -> dict[str, Any]:
        raise WrongError("two tokens differ", {"different": 2})

    for module, name in (
        (attention_parts, "correctness"), (attention_parts, "bandwidth"), (model_parts, "whole_step"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, lambda *_: {})
    monkeypatch.setattr(check, "rates", breaks)
    monkeypatch.setattr(model_parts, "sampling", is_wrong)
    code, found = run(tmp_path)
    verdicts = {name: part["verdict"] for name, part in found["parts"].items()}
    assert verdicts == dict.fromkeys(PARTS, "good") | {"rates": "BROKEN", "sampling": "WRONG"}
    assert code == 1
    assert found["parts"]["rates"]["why"] == "RuntimeError: no such kernel"
    assert found["parts"]["sampling"]["found"] == {"different": 2}


def test_wrong_attention_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = ReferenceAttention.forward

    def off_by_little(self: ReferenceAttention, *args: Any, **options: Any) -> torch.Tensor:
        return forward(self, *args, **options) * 1.001

    monkeypatch.setattr(ReferenceAttention, "forward", off_by_little)
    with pytest.raises(WrongError, match=r"relative error 1\.00e-03"):
        attention_parts.correctness(machine.Machine.here(60.0))


def test_when_time_is_up_what_is_left_is_said_not_to_have_run(tmp_path: Path) -> None:
    assert check.main(["--json", str(tmp_path / "found.json"), "--seconds", "0"]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert {part["verdict"] for part in found["parts"].values()} == {"not run"}

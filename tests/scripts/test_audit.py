import importlib.util
from pathlib import Path

import pytest

_PATH = Path(__file__).parents[2] / "scripts" / "audit.py"
_spec = importlib.util.spec_from_file_location("audit", _PATH)
assert _spec is not None
assert _spec.loader is not None
audit = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(audit)

CLEAN = {"name": "grpcio", "version": "1.85", "vulns": []}
BAD = {"name": "jinja2", "version": "3", "vulns": [{"id": "X-1", "fix_versions": ["3.1"]}]}
UNASKED = {"name": "uvicorn", "skip_reason": "not found"}
OURS = {"name": "chairlift", "skip_reason": "it is installed from a source tree"}


def test_clean_is_said_only_when_every_package_got_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.verdict([CLEAN, OURS]) == 0
    assert "no advisory is known of any of 1 packages" in capsys.readouterr().out
    assert audit.verdict([CLEAN, UNASKED, OURS]) == 2
    told = capsys.readouterr()
    assert "could not be asked, so nothing is known: 1 of 2 packages got no answer (uvicorn" in told.err


def test_what_is_known_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.verdict([CLEAN, BAD, UNASKED]) == 1
    assert capsys.readouterr().out == "jinja2 3: X-1 (fixed in: 3.1)\n"

"""Process 1 of a container obeys a stop while it is still importing."""

import ast
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A shell starts what runs in its background with SIGINT ignored, and early_stop leaves that as it is.
SLEEPER = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
{} time
print("here", flush=True)
time.sleep(60)
"""


def stopped_by(number: signal.Signals, imports: str) -> int:
    """The exit code, as the shell has it, of a process 1 that gets this signal while it sleeps."""
    unshare = shutil.which("unshare")
    command = [unshare or "unshare", "--fork", "--pid", "--kill-child", sys.executable, "-c"]
    with subprocess.Popen(
        [*command, SLEEPER.format(imports)], stdout=subprocess.PIPE, cwd=ROOT, text=True
    ) as outer:
        assert outer.stdout is not None
        if outer.stdout.readline() != "here\n":
            pytest.skip("no namespace for process ids to be had here")
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        subprocess.run(["kill", f"-{number.name.removeprefix('SIG')}", *children], check=True)
        try:
            return outer.wait(3.0)
        except subprocess.TimeoutExpired:
            outer.kill()
            return -1


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_before_the_loop_is_obeyed(number: signal.Signals) -> None:
    assert stopped_by(number, "import rpc.early_stop,") == 128 + number


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux")
def test_without_it_linux_would_lose_the_signal() -> None:
    assert stopped_by(signal.SIGTERM, "import") == -1


@pytest.mark.parametrize("service", ["router", "scheduler", "executor"])
def test_each_service_imports_it_first(service: str) -> None:
    statements = ast.parse((ROOT / service / "__main__.py").read_text()).body
    imports = [item for item in statements if isinstance(item, ast.Import | ast.ImportFrom)]
    assert ast.unparse(imports[0]) == "import rpc.early_stop"

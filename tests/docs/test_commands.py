"""What README and docs tell people to type does what they say.

`sh` blocks are run as they stand, in an empty folder, with the addresses of a server that is there in place
of those they name; `python` blocks that import what they use too. `console` blocks need what a test has not
(a package index, a terminal, Docker, a cluster): of those every `chairlift` command and flag must exist.
"""

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chairlift.__main__ import _COMMANDS, _SERVICES
from tests.rig import cluster

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SECONDS = 60
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(*languages: str) -> list[object]:
    """Of all pages, each under the name of its page and line."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in _BLOCK.finditer(text):
            if match[1] in languages:
                line = text.count("\n", 0, match.start()) + 1
                found.append(pytest.param(match[2], id=f"{page.name}:{line}"))
    return found


class Server:
    """Where the server is that blocks speak to."""

    def __init__(self, running: cluster.Cluster) -> None:
        self.grpc = running.process("router").address
        self.http = running.process("router").next_line().removeprefix("http on ")

    def addressed(self, block: str) -> str:
        return block.replace("127.0.0.1:50051", self.grpc).replace("127.0.0.1:8000", self.http)


@pytest.fixture(scope="module")
def server(tiny_model_folder: Path) -> Iterator[Server]:
    with cluster.assembling(tiny_model_folder) as running:
        running.start_executor("--num-blocks", "512")
        running.start_scheduler()
        running.start_router("--http", "127.0.0.1:0", "--model-name", "smollm2", "--default-max-tokens", "16")
        running.wait()
        yield Server(running)


@pytest.fixture(scope="module")
def environment(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "chairlift"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tests.docs.stand_in "$@"\n')
    command.chmod(0o755)
    return os.environ | {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "STAND_IN_ROUTER": server.grpc,
    }


def run(argv: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@functools.cache
def help_of(command: str) -> str:
    argv = [sys.executable, "-m", "chairlift", command, "--help"]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=True).stdout


@pytest.mark.parametrize("block", blocks("sh"))
def test_shell_blocks_run(block: str, server: Server, environment: dict[str, str], tmp_path: Path) -> None:
    if "curl " in block and shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    # What is started in the background must have started; a refusal by the server fails the block.
    script = re.sub(r" &$", "", server.addressed(block), flags=re.MULTILINE).replace("curl ", "curl --fail ")
    run(["sh", "-e", "-c", script], tmp_path, environment)


@pytest.mark.parametrize(
    "block", [param for param in blocks("python") if re.match(r"(import|from) ", param.values[0])]
)
def test_python_blocks_run(block: str, server: Server, environment: dict[str, str], tmp_path: Path) -> None:
    assert run([sys.executable, "-c", server.addressed(block)], tmp_path, environment).strip()


@pytest.mark.parametrize("block", blocks("console"))
def test_console_blocks_name_commands_and_flags_that_exist(block: str) -> None:
    joined = block.replace("\\\n", " ")
    asked = [line for line in joined.splitlines() if re.match(r"chairlift ", line)]
    for line in asked:
        command, *words = shlex.split(line.removeprefix("chairlift "), comments=True)
        assert command in _COMMANDS | _SERVICES, line
        said = help_of(command)
        for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
            assert flag in said, f"{flag} in: {line}"


def test_every_relative_link_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_flag_that_the_operators_page_names_exists() -> None:
    named = set(re.findall(r"`(--[a-z-]+)", (ROOT / "docs" / "operations.md").read_text()))
    said = "".join(help_of(service) for service in _SERVICES)
    assert {flag for flag in named if not re.search(rf"{flag}\b", said)} == set()

"""The examples run as they stand, against a real server; Node's where npm can install what it needs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from protos.v1 import router_pb2
from tests.rig import cluster
from tests.rig.client import request
from tests.rig.cluster import Cluster

EXAMPLES = Path(__file__).parents[2] / "examples"
NPM_SECONDS = 90


@pytest.fixture(scope="module")
def server(tiny_model_folder: Path) -> Iterator[Cluster]:
    with cluster.assembling(tiny_model_folder) as running:
        running.start_executor("--num-blocks", "512")
        running.start_scheduler()
        running.start_router("--http", "127.0.0.1:0")
        running.wait()
        yield running


@pytest.fixture(scope="module")
def url(server: Cluster) -> str:
    """Of the HTTP door."""
    return "http://" + server.process("router").next_line().removeprefix("http on ")


def run(*argv: str, cwd: Path | None = None, seconds: float = NPM_SECONDS) -> str:
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}  # this tree, whatever is installed
    done = subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def answer_to(server: Cluster, question: str, max_tokens: int) -> str:
    """What the model says, asked in the plainest way."""
    message = request([], max_tokens=max_tokens, ignore_eos=False)
    message.chat.CopyFrom(router_pb2.Chat(messages=[router_pb2.Message(role="user", content=question)]))
    return server.router.Complete(message, timeout=60).choices[0].text


def test_python(server: Cluster) -> None:
    said = run(sys.executable, str(EXAMPLES / "python_client.py"), server.address("router"))
    assert said.startswith(answer_to(server, "What is the capital of France?", 32))
    assert "INVALID_ARGUMENT: sampling.temperature is -1.0; it must be from 0 to 100" in said


def installed(name: str, root: Path) -> Path:
    """A copy of one of Node's examples, with what it needs."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm here")
    folder = root / "examples" / name
    shutil.copytree(EXAMPLES / name, folder, ignore=shutil.ignore_patterns("node_modules"))
    shutil.copytree(EXAMPLES.parent / "protos", root / "protos")
    installing = ("npm", "install", "--no-audit", "--no-fund", "--ignore-scripts")
    done = subprocess.run(installing, cwd=folder, capture_output=True, timeout=NPM_SECONDS, check=False)
    if done.returncode != 0:
        pytest.skip(f"npm cannot install here: {done.stderr.decode()[-200:]}")
    return folder


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed("node", tmp_path_factory.mktemp("node"))


def test_node(server: Cluster, node_folder: Path) -> None:
    said = run("node", "client.mjs", server.address("router"), "Hi", cwd=node_folder)
    text = answer_to(server, "Hi", 48)
    assert f"{text}\nFINISH_REASON_LENGTH, 48 tokens" in said
    assert f"whole: {text}" in said
    assert "INVALID_ARGUMENT: sampling.temperature is -1" in said


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_openais_own_client_for_node(server: Cluster, url: str, node_folder: Path, path: str) -> None:
    said = run("node", "openai.mjs", url + path, "Hi", cwd=node_folder)
    text = answer_to(server, "Hi", 48)
    assert said.startswith(f"{text}\n48 tokens\nwhole: {text}\n")
    assert "held: boolean" in said
    assert "BadRequestError 400 temperature: 400 temperature is -1" in said


def test_the_toy_executor_in_node_keeps_the_step_protocol(tmp_path: Path) -> None:
    folder = installed("toy-executor", tmp_path)
    command = ["node", "executor.mjs", f"unix:{tmp_path}/toy.sock"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as toy:
        try:
            assert toy.stdout is not None
            address = toy.stdout.readline().strip().removeprefix("listening on ")
            said = run(sys.executable, "-m", "chairlift", "conformance", address)
        finally:
            toy.kill()
    assert said.endswith("the executor conforms\n")
    skipped = [line for line in said.splitlines() if line.lstrip().startswith("skipped")]
    assert all("does not offer" in line for line in skipped), skipped


@pytest.mark.soak  # the compiler takes its time
@pytest.mark.skipif(
    None in map(shutil.which, ("g++", "protoc", "grpc_cpp_plugin", "pkg-config")),
    reason="there is no g++ with gRPC here (libgrpc++-dev libprotobuf-dev protobuf-compiler-grpc pkg-config)",
)
def test_cpp(server: Cluster, tmp_path: Path) -> None:
    run(str(EXAMPLES / "cpp" / "build.sh"), str(tmp_path), seconds=300)
    nobody = f"unix:{tmp_path}/nobody.sock"  # the next address is asked
    said = run(str(tmp_path / "client"), f"{nobody},{server.address('router')}", "Hi")
    assert said.startswith(f"{answer_to(server, 'Hi', 48)}\nFINISH_REASON_LENGTH, 48 tokens")
    last = run(str(tmp_path / "client"), server.address("router"), "Hi").splitlines()[-1]
    assert last == "sampling.temperature is -1.0; it must be from 0 to 100"


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_shell(server: Cluster, url: str) -> None:
    assert httpx2.get(url + "/ready").status_code == 200
    said = run(str(EXAMPLES / "shell.sh"), url, "Hi")
    assert said.startswith("data: {")
    assert said.endswith("data: [DONE]\n\n")

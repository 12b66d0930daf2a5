"""The compose file and its GPU profile, put together."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.config import RouterSettings
from rpc.settings import load

ROOT = Path(__file__).parents[2]


def resolved(*flags: str) -> dict[str, Any]:
    """What docker-compose makes of the file; it needs no engine for that."""
    command = shutil.which("docker-compose")
    if command is None:
        pytest.skip("docker-compose is not here")
    done = subprocess.run(
        [command, *flags, "config"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    config: dict[str, Any] = yaml.safe_load(done.stdout)
    return config


def test_the_gpu_profile_resolves_to_one_more_executor_with_a_gpu() -> None:
    services = resolved("--profile", "gpu")["services"]
    assert {"router", "scheduler", "standby", "executor", "executor-gpu"} <= set(services)
    gpu = services["executor-gpu"]
    assert gpu["build"]["target"] == "executor-gpu"
    assert gpu["build"]["args"]["SERVICE"] == "executor"
    (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    # The schedulers look for executors under one name.
    assert "executor" in gpu["networks"]["default"]["aliases"]
    assert "dns:///executor:50053" in services["scheduler"]["command"]
    assert gpu["read_only"] is True


def test_the_file_itself_has_the_profile() -> None:
    """Read without docker-compose, too."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert services["executor-gpu"]["profiles"] == ["gpu"]
    assert all("profiles" not in services[name] for name in ("router", "scheduler", "standby", "executor"))
    assert "/tmp:exec" in services["executor-gpu"]["tmpfs"]  # Triton loads what it compiles there


def test_the_door_that_is_published_on_this_machine_alone_keeps_other_names_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["router"]
    assert all(port.startswith("127.0.0.1:") for port in router["ports"])
    for name, value in router["environment"].items():
        monkeypatch.setenv(name, value)
    assert load(RouterSettings, router["command"], prog="router").http_hosts == "router"


def test_the_target_of_the_profile_is_in_the_dockerfile() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert "FROM executor AS executor-gpu" in dockerfile
    assert "CHAIRLIFT_DEVICE=cuda" in dockerfile
    assert dockerfile.rstrip().endswith("FROM ${SERVICE}")  # which target is built when none is named

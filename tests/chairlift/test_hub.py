"""`chairlift pull ORG/NAME` with the hub's real library and a hub of our own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chairlift import hub
from chairlift.hub import HubModel
from rpc.errors import StartError
from tests.chairlift import fake_hub

FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights" * 100_000,
    "tokenizer.json": b"{}",
    "LICENSE": b"do as you like",
    "consolidated.safetensors": b"the same in another format",
    "onnx/model.safetensors": b"yet another",
    "pytorch_model.bin": b"pickled",
    "README.md": b"words",
}


class Machine:
    """A command line whose hub, cache and models are its own."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.models_dir = folder / "models"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            "HF_HOME": str(folder / "hub"),
            "HF_ENDPOINT": endpoint,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def pull(self, model: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "chairlift", "pull", model, "--models-dir", str(self.models_dir)]
        return subprocess.run(
            command, env=self.environment | environment, capture_output=True, text=True, check=False
        )


def test_a_name_on_the_hub_is_brought_once_and_then_needs_no_hub(tmp_path: Path) -> None:
    with fake_hub.serving("org/tiny", FILES) as endpoint:
        machine = Machine(tmp_path, endpoint)
        first = machine.pull("org/tiny")
    folder = machine.models_dir / "tiny"
    assert (first.returncode, first.stdout) == (0, f"{folder}\n"), first.stderr
    names = {"config.json", "model.safetensors", "tokenizer.json", "LICENSE", "SHA256SUMS"}
    assert {path.name for path in folder.iterdir()} == names
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    (folder / "model.safetensors").unlink()
    offline = machine.pull("org/tiny", HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_one_gguf_file_is_brought_out_of_several(tmp_path: Path) -> None:
    files = {"small.Q4.gguf": b"GGUF small", "large.F32.gguf": b"GGUF large"}
    with fake_hub.serving("org/tiny-GGUF", files) as endpoint:
        machine = Machine(tmp_path, endpoint)
        result = machine.pull("org/tiny-GGUF/small.Q4.gguf")
        assert result.returncode == 0, result.stderr
        whole = machine.pull("org/tiny-GGUF")
    [path] = (machine.models_dir / "small.Q4").glob("*.gguf")
    assert path.read_bytes() == b"GGUF small"
    assert whole.returncode == 2
    assert "has no .safetensors files; for a GGUF file of it, write org/tiny-GGUF/FILE.gguf" in whole.stderr


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {}], ids=["offline", "unknown"])
def test_what_the_hub_does_not_give_is_one_line(tmp_path: Path, environment: dict[str, str]) -> None:
    with fake_hub.serving("org/tiny", FILES) as endpoint:
        result = Machine(tmp_path, endpoint).pull("org/other", **environment)
    assert result.returncode == 2
    assert result.stderr.startswith("chairlift pull: org/other could not be fetched from the hub: ")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "models" / "other").exists()


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(StartError, match=r"pip install 'chairlift\[hub\]'"):
        hub.fetch(HubModel("org/tiny", None), shows_progress=False)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("org/tiny", HubModel("org/tiny", None)),
        ("org/tiny-1.5B_x", HubModel("org/tiny-1.5B_x", None)),
        ("org/tiny/a.Q4.gguf", HubModel("org/tiny", "a.Q4.gguf")),
        ("org/tiny/sub/a.gguf", HubModel("org/tiny", "sub/a.gguf")),
        ("org/tiny/config.json", None),
        ("tiny", None),
        ("../tiny", None),
        ("./tiny", None),
        ("/srv/tiny", None),
        ("org/../tiny.gguf", None),
        ("org/tiny/../a.gguf", None),
        ("org/", None),
        ("", None),
    ],
)
def test_what_a_name_on_the_hub_looks_like(model: str, expected: HubModel | None) -> None:
    assert hub.parse(model) == expected


def test_a_model_is_called_by_the_last_part_of_its_name() -> None:
    assert HubModel("org/tiny", None).name == "tiny"
    assert HubModel("org/tiny-1.5", None).name == "tiny-1.5"
    assert HubModel("org/tiny", "sub/a.Q4.gguf").name == "a.Q4"

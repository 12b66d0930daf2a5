import asyncio
import signal
import sys
from pathlib import Path

import grpc
import pytest

from chairlift import generate, watch
from protos.v1 import common_pb2, router_pb2
from rpc.errors import RequestError, invalid
from tests.chairlift.fake_router import FakeRouter, delta, finished, listening

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


async def run(router: FakeRouter, folder: Path, *argv: str) -> int:
    async with listening(router, folder) as address:
        return await asyncio.to_thread(generate.main, [*argv, "--address", address])


async def test_the_answer_is_streamed_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    router = FakeRouter()
    router.events = [delta("The capital "), delta("is Paris."), finished(STOP)]
    assert await run(router, tmp_path, "What?") == 0
    assert capsys.readouterr().out == "The capital is Paris.\n"


async def test_what_is_not_given_stays_absent_and_what_is_given_is_sent(tmp_path: Path) -> None:
    router = FakeRouter()
    router.events = [finished(LENGTH)]
    assert await run(router, tmp_path, "Once") == 0
    assert router.requests[0] == router_pb2.GenerateRequest(text="Once", n=1)
    given = (
        "--chat --system S --max-tokens 5 --temperature 0 --top-p 0.5 --top-k 0 --min-p 0.1 --seed -3 --n 2"
    )
    assert await run(router, tmp_path, "Hi", *given.split(), "--stop", "a", "--stop", "b") == 0
    assert router.requests[1] == router_pb2.GenerateRequest(
        chat=router_pb2.Chat(
            messages=[
                router_pb2.Message(role="system", content="S"),
                router_pb2.Message(role="user", content="Hi"),
            ]
        ),
        n=2,
        stop=["a", "b"],
        sampling=common_pb2.SamplingParams(
            max_tokens=5, temperature=0, top_p=0.5, top_k=0, min_p=0.1, seed=-3
        ),
    )


async def test_several_answers_come_one_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    router = FakeRouter()
    router.events = [delta("a"), delta("x", 1), delta("b"), delta("y", 1), finished(STOP), finished(STOP, 1)]
    assert await run(router, tmp_path, "Hi", "--n", "2") == 0
    assert capsys.readouterr().out == "ab\n\n--- answer 2\nxy\n"


async def test_a_refusal_is_a_sentence_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    router = FakeRouter()
    router.refusal = invalid("max_tokens", "max_tokens is 0: it must be at least 1")
    assert await run(router, tmp_path, "Hi") == 1
    expected = "chairlift generate: max_tokens is 0: it must be at least 1 [INVALID_ARGUMENT]\n"
    assert capsys.readouterr().err == expected


async def test_overload_tells_when_to_try_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    router = FakeRouter()
    router.refusal = RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after_seconds=0.02)
    assert await run(router, tmp_path, "Hi") == 1
    assert "full [RESOURCE_EXHAUSTED]; try again in 0.0 s" in capsys.readouterr().err


async def test_an_answer_that_was_cut_off_is_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    router = FakeRouter()
    router.events = [delta("half"), finished(common_pb2.FINISH_REASON_DEADLINE)]
    assert await run(router, tmp_path, "Hi") == 1
    assert "--timeout" in capsys.readouterr().err


async def test_a_router_that_does_not_answer_in_time_is_told_with_the_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    router = FakeRouter()
    router.events, router.wait = [], asyncio.Event()
    assert await run(router, tmp_path, "Hi", "--timeout", "0.2") == 1
    said = capsys.readouterr().err
    assert said.startswith("chairlift generate: the time given was over before the router at unix:")
    assert said.endswith(" had answered [DEADLINE_EXCEEDED]\n")


@pytest.mark.parametrize("words", ["Deadline Exceeded", "Stream removed (Deadline Exceeded)", "too late"])
async def test_time_that_is_over_is_told_in_one_way(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    router = FakeRouter()
    router.refusal = RequestError(grpc.StatusCode.DEADLINE_EXCEEDED, words)
    assert await run(router, tmp_path, "Hi") == 1
    said = capsys.readouterr().err
    assert said.startswith("chairlift generate: the time given was over before the router at unix:")


async def test_a_key_that_is_missing_is_told_with_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    router = FakeRouter()
    router.refusal = RequestError(grpc.StatusCode.UNAUTHENTICATED, "an API key is required")
    monkeypatch.delenv("CHAIRLIFT_API_KEY", raising=False)
    assert await run(router, tmp_path, "Hi") == 1
    expected = "chairlift generate: an API key is required (set CHAIRLIFT_API_KEY) [UNAUTHENTICATED]\n"
    assert capsys.readouterr().err == expected
    monkeypatch.setenv("CHAIRLIFT_API_KEY", "wrong")
    assert await run(router, tmp_path, "Hi") == 1
    assert "(set" not in capsys.readouterr().err


def test_nobody_there_is_told_with_the_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"unix:{tmp_path}/nobody.sock"
    assert generate.main(["Hi", "--address", address]) == 1
    assert f"nobody answers at {address}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["Hi", "--address", "nowhere"], "--address is 'nowhere': an address is"),
        (["Hi", "--max-tokens", "few"], "--max-tokens: it is 'few', and must be a whole number"),
        (["Hi", "--timeout", "-1"], "--timeout: it is '-1', and must be a number above 0"),
        (["Hi", "--temperature", "warm"], "--temperature: it is 'warm', and must be a number"),
        (["Hi", "--tls-ca", "/no/such/file"], "--tls-ca is /no/such/file: no such file"),
        (["Hi", "--ski"], "unrecognized arguments: --ski"),
        ([], "required: prompt"),
        (["Hi", "--system", "Speak French"], "--system without --chat: a text to continue has no system"),
        (["Hi", "--system", ""], "--system without --chat"),
        (["Hi", "--tls-server-name", "router"], "--tls-server-name is given without --tls-ca"),
    ],
)
def test_a_wrong_flag_is_one_sentence_and_exit_code_2(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        generate.main(argv)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("chairlift generate: ")
    assert says in said
    assert said.count("\n") == 1


def test_a_number_that_the_contract_cannot_hold_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["Hi", "--seed", str(2**64)]) == 1
    assert "seed does not fit" in capsys.readouterr().err


async def test_ctrl_c_cancels_the_request(tmp_path: Path) -> None:
    router = FakeRouter()
    router.events, router.wait = [delta("on and on")], asyncio.Event()
    async with listening(router, tmp_path) as address:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "chairlift", "generate", "Hi", "--address", address),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        assert await process.stdout.readexactly(9) == b"on and on"
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 128 + signal.SIGINT
        async with asyncio.timeout(10):
            while not router.num_cancelled:  # noqa: ASYNC110 - the server's side has no event to wait for
                await asyncio.sleep(0.01)


async def test_watch_tells_each_change_of_the_membership(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def summary(step_id: int, *ids: str, left: str = "") -> router_pb2.StepSummary:
        return router_pb2.StepSummary(
            executor_id="gpu-0",
            step_id=step_id,
            members=[router_pb2.StepMember(request_id=name, seq_id=ord(name)) for name in ids],
            left=[router_pb2.StepLeaver(request_id=name, seq_id=ord(name)) for name in left],
        )

    router = FakeRouter()
    router.summaries = [summary(1, "a", "b"), summary(2, "a", "b"), summary(3, "c", "b", left="a")]
    async with listening(router, tmp_path) as address:
        assert await asyncio.to_thread(watch.main, ["--address", address]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "gpu-0  step     1   a b   a takes seat 1, b takes seat 2",
        "gpu-0  step     3   c b   a left, c takes seat 1",
    ]

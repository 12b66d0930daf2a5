"""Both clients against a router that does as it is told; the same tests for each."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

import chairlift
from chairlift import Answer, AsyncClient, AsyncStream, ChairliftError, Client, FinishReason, Piece, Stream
from protos.v1 import common_pb2, router_pb2
from rpc.errors import RequestError, abort, invalid
from tests.chairlift.fake_router import FakeRouter, delta, finished, listening

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
LOST = RequestError(grpc.StatusCode.UNAVAILABLE, "gone")
HELD = RequestError(grpc.StatusCode.ALREADY_EXISTS, "a request of this id is still running", "request_id")
FULL = RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after_seconds=0.02)

Ask = Callable[..., Any]


class Moody(FakeRouter):
    """Answers one call after the other from `turns`: events to send, then a refusal, or None for none."""

    def __init__(self, *turns: tuple[list[router_pb2.GenerateEvent], RequestError | None]) -> None:
        super().__init__()
        self.turns = list(turns)
        self.remaining_seconds: list[float | None] = []

    async def Generate(self, request: router_pb2.GenerateRequest, context: Any) -> Any:  # noqa: N802 - the contract's
        self.requests.append(request)
        events, refusal = self.turns[len(self.requests) - 1]
        for event in events:
            yield event
            await asyncio.sleep(0.02)  # else gRPC may drop what comes together with an error
        if refusal is not None:
            await abort(context, refusal)

    async def Complete(  # noqa: N802 - the contract's
        self, request: router_pb2.GenerateRequest, context: Any
    ) -> router_pb2.GenerateResponse:
        self.requests.append(request)
        self.remaining_seconds.append(context.time_remaining())
        events, refusal = self.turns[len(self.requests) - 1]
        if refusal is not None:
            await abort(context, refusal)
        response = router_pb2.GenerateResponse(accepted=events[0].accepted)
        response.choices.add(
            text=events[1].delta.text, token_ids=events[1].delta.token_ids, finished=events[-1].finished
        )
        return response


def accepted(seed: int = 5, token: str = "") -> router_pb2.GenerateEvent:
    told = router_pb2.Accepted(request_id="r", seed=seed, resume_token=token)
    return router_pb2.GenerateEvent(accepted=told)


async def generate_blocking(address: str, *args: Any, retries: int = 5, **options: Any) -> Answer:
    def ask() -> Answer:
        with Client(address, max_retries=retries) as client:
            return client.generate(*args, **options)

    return await asyncio.to_thread(ask)


async def generate_async(address: str, *args: Any, retries: int = 5, **options: Any) -> Answer:
    async with AsyncClient(address, max_retries=retries) as client:
        return await client.generate(*args, **options)


async def stream_blocking(
    address: str, *args: Any, retries: int = 5, shown: list[Piece] | None = None, **options: Any
) -> Answer:
    def ask() -> Answer:
        with Client(address, max_retries=retries) as client, client.stream(*args, **options) as stream:
            for piece in stream:
                (shown if shown is not None else []).append(piece)
            return stream.answer

    return await asyncio.to_thread(ask)


async def stream_async(
    address: str, *args: Any, retries: int = 5, shown: list[Piece] | None = None, **options: Any
) -> Answer:
    async with AsyncClient(address, max_retries=retries) as client, client.stream(*args, **options) as stream:
        async for piece in stream:
            (shown if shown is not None else []).append(piece)
        return stream.answer


ALL = pytest.mark.parametrize("ask", [generate_blocking, generate_async, stream_blocking, stream_async])
STREAMS = pytest.mark.parametrize("ask", [stream_blocking, stream_async])


@ALL
async def test_an_answer_is_typed_and_whole(ask: Ask, tmp_path: Path) -> None:
    router = Moody(([accepted(), delta("Paris."), finished(STOP)], None))
    async with listening(router, tmp_path) as address:
        answer = await ask(address, "What?", max_tokens=3, temperature=0)
    assert (answer.text, answer.seed, answer.request_id) == ("Paris.", 5, "r")
    assert answer.choices[0].finish_reason is FinishReason.STOP
    assert router.requests[0] == router_pb2.GenerateRequest(
        text="What?", sampling=common_pb2.SamplingParams(max_tokens=3, temperature=0)
    )


@ALL
async def test_a_refusal_for_load_waits_as_told_and_a_lost_router_is_tried_again(
    ask: Ask, tmp_path: Path
) -> None:
    router = Moody(([], FULL), ([], LOST), ([accepted(), delta("ok"), finished(STOP)], None))
    async with listening(router, tmp_path) as address:
        assert (await ask(address, "Hi", request_id="mine")).text == "ok"
    assert [request.request_id for request in router.requests] == ["mine"] * 3


@ALL
async def test_its_own_request_that_the_router_has_not_missed_yet_is_waited_for(
    ask: Ask, tmp_path: Path
) -> None:
    router = Moody(([], LOST), ([], HELD), ([], HELD), ([accepted(), delta("ok"), finished(STOP)], None))
    async with listening(router, tmp_path) as address:
        assert (await ask(address, "Hi", request_id="mine", retries=1)).text == "ok"
    assert [request.request_id for request in router.requests] == ["mine"] * 4


@ALL
async def test_an_id_that_somebody_uses_is_refused_at_once(ask: Ask, tmp_path: Path) -> None:
    router = Moody(([], HELD))
    async with listening(router, tmp_path) as address:
        with pytest.raises(ChairliftError, match="still running") as raised:
            await ask(address, "Hi", request_id="mine")
    assert (raised.value.code, len(router.requests)) == ("ALREADY_EXISTS", 1)


@ALL
async def test_a_wrong_request_is_one_error_with_code_message_and_field(ask: Ask, tmp_path: Path) -> None:
    router = Moody(([], invalid("sampling.top_p", "sampling.top_p is 7")))
    async with listening(router, tmp_path) as address:
        with pytest.raises(ChairliftError, match="is 7") as raised:
            await ask(address, "Hi", top_p=7)
    error = raised.value
    assert (error.code, error.message, error.field) == (
        "INVALID_ARGUMENT",
        "sampling.top_p is 7",
        "sampling.top_p",
    )
    assert len(router.requests) == 1


@ALL
async def test_retries_are_bounded(ask: Ask, tmp_path: Path) -> None:
    router = Moody(([], FULL), ([], FULL), ([], FULL))
    async with listening(router, tmp_path) as address:
        with pytest.raises(ChairliftError, match="full") as raised:
            await ask(address, "Hi", retries=2)
    assert (raised.value.code, raised.value.retry_after_seconds) == ("RESOURCE_EXHAUSTED", 0.02)
    assert len(router.requests) == 3


@ALL
async def test_b106_a_router_that_lets_go_of_its_calls_as_it_stops_is_asked_again(
    ask: Ask, tmp_path: Path
) -> None:
    let_go = RequestError(grpc.StatusCode.CANCELLED, "the server stops")
    router = Moody(([], let_go), ([], let_go))
    async with listening(router, tmp_path) as address:
        with pytest.raises(ChairliftError, match="gave the call up"):
            await ask(address, "Hi", retries=1)
    assert len(router.requests) == 2


@ALL
async def test_nobody_there_is_told_with_the_address(ask: Ask, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/nobody.sock"
    with pytest.raises(ChairliftError, match=f"nobody answers at {address}") as raised:
        await ask(address, "Hi", retries=0)
    assert raised.value.code == "UNAVAILABLE"


@STREAMS
async def test_b106_a_broken_stream_goes_on_where_it_stopped(ask: Ask, tmp_path: Path) -> None:
    router = Moody(
        ([accepted(), delta("The capital "), delta("is")], LOST),
        ([], LOST),
        ([accepted(), delta("The cap"), delta("ital is Par"), delta("is."), finished(STOP)], None),
    )
    shown: list[Piece] = []
    async with listening(router, tmp_path) as address:
        answer = await ask(address, "What?", shown=shown, request_id="mine")
    assert "".join(piece.text for piece in shown) == answer.text == "The capital is Paris."
    assert [request.sampling.seed for request in router.requests[1:]] == [5, 5]
    assert [request.request_id for request in router.requests] == ["mine", "", ""]


@STREAMS
async def test_b106_a_stream_is_resumed_by_its_token_at_the_next_router(ask: Ask, tmp_path: Path) -> None:
    def with_ids(text: str) -> router_pb2.GenerateEvent:
        return router_pb2.GenerateEvent(delta=router_pb2.Delta(text=text, token_ids=list(text.encode())))

    first_folder, second_folder = tmp_path / "1", tmp_path / "2"
    first_folder.mkdir()
    second_folder.mkdir()
    first = Moody(([accepted(token="t"), with_ids("The "), with_ids("end")], LOST), ([], LOST))
    second = Moody(([], LOST), ([accepted(token="t"), with_ids("ing."), finished(STOP)], None))
    shown: list[Piece] = []
    async with listening(first, first_folder) as here, listening(second, second_folder) as there:
        answer = await ask(f"{here},{there}", "What?", shown=shown)
    assert "".join(piece.text for piece in shown) == answer.text == "The ending."
    assert bytes(answer.choices[0].token_ids) == b"The ending."
    assert [len(first.requests), len(second.requests)] == [2, 2], "they are asked in turn"
    asked = router_pb2.GenerateRequest(text="What?", request_id="r")
    asked.resume.resume_token = "t"
    asked.resume.received.add(index=0, token_ids=b"The end")
    assert second.requests[1] == asked


@STREAMS
async def test_where_no_router_knows_the_token_the_request_is_repeated(ask: Ask, tmp_path: Path) -> None:
    unknown = RequestError(grpc.StatusCode.PERMISSION_DENIED, "not ours", field="resume.resume_token")
    router = Moody(
        ([accepted(token="t"), delta("The cap")], LOST),
        ([], unknown),
        ([accepted(token="u"), delta("The capital"), finished(STOP)], None),
    )
    async with listening(router, tmp_path) as address:
        assert (await ask(address, "What?")).text == "The capital"
    assert not router.requests[2].HasField("resume")
    assert router.requests[2].sampling.seed == 5


@STREAMS
async def test_another_answer_is_not_spliced_onto_the_first(ask: Ask, tmp_path: Path) -> None:
    router = Moody(([accepted(), delta("one")], LOST), ([accepted(), delta("two"), finished(STOP)], None))
    async with listening(router, tmp_path) as address:
        with pytest.raises(ChairliftError, match="does not go on with this answer") as raised:
            await ask(address, "What?")
    assert raised.value.code == "ABORTED"


async def test_leaving_a_stream_early_cancels_the_request(tmp_path: Path) -> None:
    router = FakeRouter()
    router.events, router.wait = [accepted(), delta("on and on")], asyncio.Event()

    def read_one(address: str) -> None:
        with Client(address) as client, client.stream("Hi") as stream:
            assert next(stream).text == "on and on"
            with pytest.raises(RuntimeError, match="not come to its end"):
                _ = stream.answer

    async with listening(router, tmp_path) as address:
        async with AsyncClient(address) as client, client.stream("Hi") as stream:
            assert (await anext(stream)).text == "on and on"
        await asyncio.to_thread(read_one, address)
        async with asyncio.timeout(10):
            while router.num_cancelled < 2:  # noqa: ASYNC110 - the server's side has no event to wait for
                await asyncio.sleep(0.01)


class Endless(FakeRouter):
    """Begins an answer to whatever is asked, and never ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.events, self.wait = [accepted(), delta("on and on")], asyncio.Event()

    async def Complete(self, request: router_pb2.GenerateRequest, context: Any) -> Any:  # noqa: N802 - the contract's
        self.requests.append(request)
        try:
            await self.wait.wait()
        finally:
            self.num_cancelled += 1


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the server's side has no event to wait for
            await asyncio.sleep(0.01)


async def whole(client: Client | AsyncClient) -> Answer:
    if isinstance(client, AsyncClient):
        return await client.generate("Hi")
    return await asyncio.to_thread(client.generate, "Hi")


async def read(stream: Stream | AsyncStream) -> list[Piece]:
    if isinstance(stream, AsyncStream):
        return [piece async for piece in stream]
    return await asyncio.to_thread(list, stream)


async def streamed(client: Client | AsyncClient) -> list[Piece]:
    return await read(client.stream("Hi"))


async def close(one: Client | AsyncClient | Stream | AsyncStream) -> None:
    if isinstance(one, AsyncClient | AsyncStream):
        await one.close()
    else:
        await asyncio.to_thread(one.close)


KINDS = pytest.mark.parametrize("kind", [Client, AsyncClient])
FORMS = pytest.mark.parametrize("form", [whole, streamed])


@KINDS
@FORMS
async def test_closing_the_client_cancels_what_runs_and_refuses_what_comes(
    form: Ask, kind: type[Client | AsyncClient], tmp_path: Path
) -> None:
    router = Endless()
    async with listening(router, tmp_path) as address:
        client = kind(address)
        asked = [asyncio.create_task(form(client)) for _ in range(3)]
        await until(lambda: len(router.requests) == 3)
        await close(client)
        for one in asked:
            with pytest.raises(ChairliftError, match="the client was closed") as raised:
                await one
            assert raised.value.code == "CANCELLED"
        await until(lambda: router.num_cancelled == 3)
        with pytest.raises(ChairliftError, match="the client was closed"):
            await form(client)
        await close(client)  # once more changes nothing
    assert len(router.requests) == 3


@KINDS
@FORMS
async def test_closing_the_client_ends_a_pause_before_the_next_try(
    form: Ask, kind: type[Client | AsyncClient], tmp_path: Path
) -> None:
    router = Moody(([], RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after_seconds=100)))
    async with listening(router, tmp_path) as address:
        client = kind(address)
        asked = asyncio.create_task(form(client))
        await until(lambda: router.requests)
        await asyncio.sleep(0.1)  # for the refusal to arrive; before or after it, the outcome is the same
        await close(client)
        with pytest.raises(ChairliftError, match="the client was closed"):
            async with asyncio.timeout(10):
                await asked


@KINDS
async def test_closing_the_client_cancels_a_stream_that_nobody_reads_just_now(
    kind: type[Client | AsyncClient], tmp_path: Path
) -> None:
    async def next_of(stream: Stream | AsyncStream) -> Piece:
        return await (anext(stream) if isinstance(stream, AsyncStream) else asyncio.to_thread(next, stream))

    router = Endless()
    async with listening(router, tmp_path) as address:
        client = kind(address)
        stream = client.stream("Hi")
        assert (await next_of(stream)).text == "on and on"
        await close(client)
        await until(lambda: router.num_cancelled)
        with pytest.raises(ChairliftError, match="the client was closed"):
            await next_of(stream)


@KINDS
async def test_a_stream_is_closed_while_another_reads_it(
    kind: type[Client | AsyncClient], tmp_path: Path
) -> None:
    router = Endless()
    async with listening(router, tmp_path) as address:
        client = kind(address)
        stream = client.stream("Hi")
        reader = asyncio.create_task(read(stream))
        await until(lambda: router.requests)
        await asyncio.sleep(0.05)  # for the reader to wait in it; before or after, the outcome is the same
        await close(stream)
        assert "".join(piece.text for piece in await reader) in {"", "on and on"}
        await until(lambda: router.num_cancelled)
        with pytest.raises(RuntimeError, match="not come to its end"):
            _ = stream.answer
        assert await read(stream) == []
        await close(stream)
        await close(client)
    assert len(router.requests) == 1


@KINDS
async def test_a_stream_that_was_closed_before_it_was_read_asks_nothing(
    kind: type[Client | AsyncClient], tmp_path: Path
) -> None:
    router = Endless()
    async with listening(router, tmp_path) as address:
        client = kind(address)
        stream = client.stream("Hi")
        await close(stream)
        assert await read(stream) == []
        await close(client)
    assert not router.requests


@FORMS
async def test_a_task_that_was_cancelled_is_cancelled_whatever_is_closed(form: Ask, tmp_path: Path) -> None:
    router = Endless()
    async with listening(router, tmp_path) as address:
        client = AsyncClient(address)
        asked = asyncio.create_task(form(client))
        await until(lambda: router.requests)
        asked.cancel()
        await client.close()
        with pytest.raises(asyncio.CancelledError):
            await asked


async def test_ctrl_c_cancels_a_whole_answer_of_a_client_that_stays_open(tmp_path: Path) -> None:
    code = """
import sys, chairlift
client = chairlift.Client(sys.argv[1])
try:
    client.generate("Hi")
except KeyboardInterrupt:
    sys.stdin.read()
"""
    router = Endless()
    async with listening(router, tmp_path) as address:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, address, stdin=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(60):
            while not router.requests:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.01)
        process.send_signal(signal.SIGINT)
        await until(lambda: router.num_cancelled)
        assert process.returncode is None
        await process.communicate(b"")
    assert process.returncode == 0


async def test_a_time_limit_is_the_deadline_of_the_call(tmp_path: Path) -> None:
    router = Moody(([accepted(), delta("ok"), finished(STOP)], None))
    async with listening(router, tmp_path) as address:
        await generate_async(address, "Hi", timeout_seconds=9)
    assert router.remaining_seconds[0] is not None
    assert 8 < router.remaining_seconds[0] < 10


@ALL
async def test_an_endless_time_limit_is_none(ask: Ask, tmp_path: Path) -> None:
    router = Moody(*[([accepted(), delta("ok"), finished(STOP)], None)] * 2)
    async with listening(router, tmp_path) as address:
        for endless in (float("inf"), 1e11):
            assert (await ask(address, "Hi", timeout_seconds=endless)).text == "ok"
    with pytest.raises(ValueError, match="timeout_seconds is nan"):
        await ask(address, "Hi", timeout_seconds=float("nan"))


async def test_a_chat_may_be_one_sentence(tmp_path: Path) -> None:
    router = Moody(*[([accepted(), delta("ok"), finished(STOP)], None)] * 2)

    def ask(address: str) -> str:
        with Client(address) as client:
            return client.chat("Hi").text

    async with listening(router, tmp_path) as address:
        assert await asyncio.to_thread(ask, address) == "ok"
        async with AsyncClient(address) as client:
            assert (await client.chat([chairlift.Message("user", "Hi")])).text == "ok"
    assert router.requests[0] == router.requests[1]
    assert router.requests[0].chat.messages[0].content == "Hi"


async def test_a_chat_has_a_message(tmp_path: Path) -> None:
    with Client(f"unix:{tmp_path}/nobody") as client, pytest.raises(ValueError, match="messages is empty"):
        client.chat([])


async def test_a_client_goes_on_in_the_next_loop_when_one_has_ended(tmp_path: Path) -> None:
    router = Moody(*[([accepted(), delta("Hi"), finished(STOP)], None)] * 4)

    def ask(address: str) -> list[str]:
        client = AsyncClient(address)

        async def answered() -> str:
            async with client.stream("What?") as stream:
                async for _ in stream:
                    pass
            return (await client.generate("What?")).text + stream.answer.text

        texts = [asyncio.run(answered()) for _ in range(2)]
        asyncio.run(client.close())
        return texts

    async with listening(router, tmp_path) as address:
        assert await asyncio.to_thread(ask, address) == ["HiHi"] * 2


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_an_address_that_is_none_is_refused_at_once(kind: type[Client | AsyncClient]) -> None:
    with pytest.raises(ValueError, match="address is 'nowhere'"):
        kind("nowhere")


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_name_that_nobody_would_look_at_is_refused(kind: type[Client | AsyncClient]) -> None:
    with pytest.raises(ValueError, match="given without --tls-ca: no TLS is spoken"):
        kind("localhost:1", tls_server_name="router")


def test_importing_the_package_loads_no_grpc_and_knows_its_names() -> None:
    code = (
        "import sys, chairlift; assert 'grpc' not in sys.modules; "
        "[getattr(chairlift, name) for name in chairlift.__all__]; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = chairlift.Nothing


def test_every_package_of_ours_that_a_client_imports_says_that_it_is_typed() -> None:
    code = "import sys, chairlift.client; print(*(name for name in sys.modules if '.' not in name))"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    root = Path(chairlift.__file__).parent.parent
    ours = {name for name in shown.stdout.split() if (root / name / "__init__.py").exists()}
    assert {"chairlift", "protos", "rpc"} <= ours
    assert [name for name in sorted(ours) if not (root / name / "py.typed").exists()] == []

"""A router that wants API keys, asked through both of its doors."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest

from protos.v1 import common_pb2, router_pb2
from protos.v1.router_pb2 import GenerateRequest
from router.http.app import HttpApp
from router.http.server import HttpDoor
from router.keys import hashed
from router.tokenizer import Tokenizer
from tests.rig.scripted_scheduler import ScriptedScheduler
from tests.router.stack import Rig, letters, rig

STOP = common_pb2.FINISH_REASON_STOP
RED, BLUE, BOSS = "chairlift-red", "chairlift-blue", "chairlift-boss"
TENANTS = f"""
[red]
keys = ["{hashed(RED)}"]
best_priority = -5

[blue]
keys = ["{hashed(BLUE)}"]
best_priority = 3

[boss]
keys = ["{hashed(BOSS)}"]
admin = true
"""


def key(value: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {value}"),)


class Explaining(ScriptedScheduler):
    """Remembers who asked for what."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.explained: list[tuple[str, str]] = []

    async def Explain(self, request: router_pb2.ExplainRequest, context: Any) -> router_pb2.ExplainResponse:  # noqa: N802
        self.explained.append((request.tenant, request.request_id))
        return router_pb2.ExplainResponse(request_id=request.request_id)


@dataclass
class Doors:
    router: Rig
    http: httpx2.AsyncClient
    tenants: Path
    scheduler: Explaining


@pytest.fixture
async def doors(tmp_path: Path, tokenizer: Tokenizer) -> AsyncIterator[Doors]:
    path = tmp_path / "tenants.toml"
    path.write_text(TENANTS)
    scheduler = Explaining(script=letters("ok"))
    async with contextlib.AsyncExitStack() as stack:
        router = await stack.enter_async_context(rig(tmp_path, tokenizer, scheduler, tenants=str(path)))
        app = HttpApp(router.intake, max_body_bytes=1 << 20, doorkeeper=router.doorkeeper)
        door = HttpDoor(app, f"unix:{tmp_path}/http.sock")
        await door.open()
        stack.push_async_callback(door.stop)
        transport = httpx2.AsyncHTTPTransport(uds=f"{tmp_path}/http.sock")
        client = httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=20)
        yield Doors(router, await stack.enter_async_context(client), path, scheduler)


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await (call.read() if hasattr(call, "read") else call)
    return raised.value


SERVICE = router_pb2.DESCRIPTOR.services_by_name["Router"]


@pytest.mark.parametrize("method", [method.name for method in SERVICE.methods])
async def test_no_method_answers_without_a_key(doors: Doors, method: str) -> None:
    request = getattr(router_pb2, SERVICE.methods_by_name[method].input_type.name)()
    for metadata, says in (((), "an API key is required"), (key("wrong"), "is not known here")):
        error = await refusal(getattr(doors.router.stub, method)(request, metadata=metadata))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert says in error.details()


@pytest.mark.parametrize(
    ("verb", "path"),
    [
        *(("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models")),
        *(("GET", "/v1/models/tiny"), ("POST", "/tokenize"), ("POST", "/detokenize")),
    ],
)
async def test_no_path_but_health_answers_without_a_key(doors: Doors, verb: str, path: str) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": RED}):
        response = await doors.http.request(verb, path, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.json()["error"]["type"] == "authentication_error"
    for path_of_probes in ("/health", "/ready"):
        assert (await doors.http.get(path_of_probes)).status_code == 200


async def test_strangers_leave_no_line_in_the_log(doors: Doors, capsys: pytest.CaptureFixture[str]) -> None:
    assert (await doors.http.post("/v1/completions", json={})).status_code == 401
    known = {"authorization": f"Bearer {RED}"}
    assert (await doors.http.post("/v1/completions", json={}, headers=known)).status_code == 400
    told = capsys.readouterr().out
    assert told.count("request_failed") == 1
    assert "UNAUTHENTICATED" not in told


async def test_a_request_bears_its_tenant_and_what_it_may_share_is_its_tenants(doors: Doors) -> None:
    for index, name in enumerate((RED, BLUE)):
        asked = GenerateRequest(text="hi", request_id="same", priority=3, cache_salt="s")
        await doors.router.stub.Complete(asked, metadata=key(name))
        headers = {"authorization": f"bearer {name}"}
        body = {"prompt": "hi", "request_id": "same", "priority": 3, "cache_salt": "s"}
        assert (await doors.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        one, two = doors.scheduler.submits[2 * index :]
        assert one.tenant == two.tenant == ("red", "blue")[index]
        assert one.key == two.key
        assert one.cache_salt == two.cache_salt
    red, _, blue, _ = doors.scheduler.submits
    assert red.key != blue.key
    assert red.cache_salt != blue.cache_salt


async def test_two_tenants_may_use_the_same_request_id_at_once(doors: Doors) -> None:
    doors.scheduler.script = None
    stub = doors.router.stub
    first = stub.Generate(GenerateRequest(text="hi", request_id="mine"), metadata=key(RED))
    await doors.scheduler.submitted(1)
    again = await refusal(stub.Complete(GenerateRequest(text="hi", request_id="mine"), metadata=key(RED)))
    assert again.code() is grpc.StatusCode.ALREADY_EXISTS
    other = stub.Complete(GenerateRequest(text="hi", request_id="mine", priority=3), metadata=key(BLUE))
    asking = asyncio.ensure_future(other)
    second = await doors.scheduler.submitted(2)
    await doors.scheduler.give(second, [97, 257], finish=STOP)
    assert (await asking).choices[0].text == "a"
    first.cancel()
    await doors.router.quiet()


@pytest.mark.parametrize(
    ("name", "priority", "allowed"), [(RED, -5, True), (RED, -6, False), (BLUE, 2, False)]
)
async def test_a_priority_beyond_the_key_is_denied_at_both_doors(
    doors: Doors, name: str, priority: int, allowed: bool
) -> None:
    request = GenerateRequest(text="hi", priority=priority)
    body = {"prompt": "hi", "priority": priority}
    headers = {"authorization": f"Bearer {name}"}
    response = await doors.http.post("/v1/completions", json=body, headers=headers)
    if allowed:
        await doors.router.stub.Complete(request, metadata=key(name))
        assert response.status_code == 200
        return
    error = await refusal(doors.router.stub.Complete(request, metadata=key(name)))
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert f"priority is {priority}; the key of tenant" in error.details()
    assert response.status_code == 403
    assert response.json()["error"]["param"] == "priority"
    assert doors.scheduler.submits == []


async def test_a_priority_that_there_is_not_is_wrong_before_it_is_denied(doors: Doors) -> None:
    request = GenerateRequest(text="hi", priority=-1001)
    error = await refusal(doors.router.stub.Complete(request, metadata=key(BLUE)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_explain_is_asked_on_behalf_of_the_keys_tenant(doors: Doors) -> None:
    stub = doors.router.stub
    await stub.Explain(router_pb2.ExplainRequest(request_id="r"), metadata=key(RED))
    await stub.Explain(router_pb2.ExplainRequest(request_id="r"), metadata=key(BOSS))
    assert doors.scheduler.explained == [("red", "r"), ("boss", "r")]
    forged = router_pb2.ExplainRequest(request_id="r", tenant="blue")
    error = await refusal(stub.Explain(forged, metadata=key(RED)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "tenant is for admins' keys to set" in error.details()


async def test_an_admin_reads_the_story_of_any_tenants_request(doors: Doors) -> None:
    asked = router_pb2.ExplainRequest(request_id="r", tenant="blue")
    await doors.router.stub.Explain(asked, metadata=key(BOSS))
    assert doors.scheduler.explained == [("blue", "r")]


async def test_watch_is_for_admins(doors: Doors) -> None:
    stub = doors.router.stub
    error = await refusal(stub.Watch(router_pb2.WatchRequest(), metadata=key(RED)))
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "the key of tenant 'red' is no admin's" in error.details()
    doors.scheduler.summaries.append(router_pb2.StepSummary(executor_id="e"))
    assert (await stub.Watch(router_pb2.WatchRequest(), metadata=key(BOSS)).read()).executor_id == "e"


async def test_status_is_for_admins(doors: Doors) -> None:
    stub = doors.router.stub
    error = await refusal(stub.GetStatus(router_pb2.GetStatusRequest(), metadata=key(RED)))
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    status = await stub.GetStatus(router_pb2.GetStatusRequest(), metadata=key(BOSS))
    assert status.refusal == ""
    assert [one.scheduler_id for one in status.schedulers] == [""], "this one tells nobody its load"


async def test_a_removed_key_stops_working_for_new_calls_and_running_ones_go_on(
    doors: Doors, capsys: pytest.CaptureFixture[str]
) -> None:
    doors.scheduler.script = None
    stub = doors.router.stub
    running = asyncio.ensure_future(stub.Complete(GenerateRequest(text="hi"), metadata=key(RED)))
    submit = await doors.scheduler.submitted()
    doors.tenants.write_text(TENANTS.replace(hashed(RED), hashed("chairlift-new")))
    error = await refusal(stub.Complete(GenerateRequest(text="hi"), metadata=key(RED)))
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    await stub.GetModel(router_pb2.GetModelRequest(), metadata=key("chairlift-new"))
    await doors.scheduler.give(submit, [97, 257], finish=STOP)
    assert (await running).choices[0].text == "a"
    printed = capsys.readouterr()
    for secret in (RED, "chairlift-new", hashed(RED)):
        assert secret not in printed.out + printed.err


async def test_without_keys_explain_still_refuses_a_tenant(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with rig(tmp_path, tokenizer) as router:
        error = await refusal(router.stub.Explain(router_pb2.ExplainRequest(request_id="r", tenant="t")))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT

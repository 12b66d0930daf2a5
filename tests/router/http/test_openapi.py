"""The door's description: served, complete, and true of whatever a tool that reads it sends and gets back."""

import asyncio
import contextlib
import itertools
import resource
from collections.abc import AsyncIterator
from typing import Any

import pytest
from schemathesis import GenerationMode
from starlette.applications import Starlette

from router.http import description
from router.http.app import HttpApp
from router.http.server import HttpDoor
from tests.rig.scripted_scheduler import ScriptedScheduler
from tests.router.afar import number_told_by
from tests.router.http import asking
from tests.router.http.test_app import HI, HttpRig, Serve, serve
from tests.router.stack import letters

__all__ = ["serve"]  # the fixture
MAX_GROWTH_BYTES = 64 * 1024 * 1024


async def test_it_is_served_to_everybody_and_names_every_path(serve: Serve) -> None:
    async with serve() as running:
        response = await running.client.get("/openapi.json")
        assert response.json() == description.described()
        app = running.door._app.asgi
        assert isinstance(app, Starlette)
        served = {
            (route.path.replace(":path", ""), method) for route in app.routes for method in route.methods
        }
        described = {
            (path, method.upper())
            for path, operations in description.described()["paths"].items()
            for method in operations
        }
        assert {(path, method) for path, method in served if method != "HEAD"} == {
            *described,
            ("/openapi.json", "GET"),
        }


async def test_it_is_served_without_a_key_where_keys_are_needed(serve: Serve, tmp_path: Any) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(f'[acme]\nkeys = ["sha256:{"0" * 64}"]\n')
    async with serve(tenants=str(tenants)) as running:
        assert (await running.client.get("/openapi.json")).status_code == 200
        assert (await running.client.get("/v1/models")).status_code == 401


# --- whatever a tool makes of it --------------------------------------------------------------------


@contextlib.asynccontextmanager
async def at_a_port(serve: Serve) -> AsyncIterator[str]:
    """The door's address, for a client that asks from a thread of its own."""
    scheduler = ScriptedScheduler(script=letters("ok"))
    assert scheduler.welcome is not None
    scheduler.welcome.features.extend(["constraints", "penalties", "logit_bias", "token_lists"])
    async with serve(scheduler) as running:
        await eventually_answered(running, prompt="Hi", choice=["x"])  # what tries constraints has started
        router = running.router  # bodies may be as long as the description lets a tool make them
        app = HttpApp(router.intake, max_body_bytes=16 << 20, doorkeeper=router.doorkeeper)
        door = HttpDoor(app, "127.0.0.1:0")
        yield f"http://{await door.open()}"
        async with asyncio.timeout(60):
            await running.router.quiet()
        await door.stop()


async def eventually_answered(running: HttpRig, **body: Any) -> None:
    """However long a busy machine takes to start a process."""
    async with asyncio.timeout(100):
        while (await running.post("/v1/completions", **body)).status_code != 200:
            pass


@pytest.mark.parametrize("mode", list(GenerationMode))
async def test_whatever_a_tool_makes_of_it_is_answered_as_it_says(serve: Serve, mode: GenerationMode) -> None:
    async with at_a_port(serve) as url:
        await asyncio.to_thread(asking.ask, url, 30, mode, 1)


async def test_events_of_a_stream_are_as_described(serve: Serve) -> None:
    async with serve(ScriptedScheduler(script=letters("Grüße"))) as running:
        for path, asked in (
            ("/v1/completions", {"prompt": "Hi", "logprobs": 1, "n": 2}),
            ("/v1/chat/completions", {"messages": HI, "stream_options": {"include_usage": True}}),
        ):
            response = await running.post(path, **asked, stream=True)
            assert response.text.count("data: ") > 5
            asking.check_events(path, response.text)


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
async def test_20_000_inputs_by_the_description_leave_nothing_behind(serve: Serve) -> None:
    num_asked, before = 0, 0
    async with at_a_port(serve) as url:
        for start in itertools.count():
            for mode in GenerationMode:
                num_asked += await number_told_by("tests.router.http.asking", url, 100, mode.name, start)
            if num_asked >= 20_000:
                break
            if num_asked <= 4_000:  # until then everything has been met that is kept
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        assert grown < MAX_GROWTH_BYTES

"""A router in the test's own process, before a scheduler that the test speaks for."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from protos.v1 import router_pb2_grpc, scheduler_pb2
from router.intake import Intake, ServedModel
from router.key_file import Doorkeeper
from router.scheduler_client import SchedulerClient
from router.scheduler_pool import SchedulerPool
from router.scheduler_session import TokenizerIdentity
from router.servicer import RouterServicer, header
from router.tokenizer import Tokenizer
from router.tool_calls import ToolCallForm
from router.validation import Defaults
from rpc.address import Address
from rpc.channel import connect, server_options
from rpc.door import Door
from tests.rig import tiny_model
from tests.rig.scripted_scheduler import MAX_MESSAGE_BYTES, ScriptedScheduler, serving


@dataclass
class Rig:
    """One router before one scripted scheduler."""

    stub: "router_pb2_grpc.RouterAsyncStub"
    scheduler: ScriptedScheduler
    servicer: RouterServicer
    intake: Intake
    pool: SchedulerPool
    doorkeeper: Doorkeeper

    async def serving(self) -> None:
        """Waits until requests are taken."""
        await eventually(lambda: self.pool.refusal is None)

    async def quiet(self) -> None:
        """Waits until nothing is left of any request."""
        await eventually(lambda: self.intake.num_live == 0)
        assert all(client.num_live == 0 for client in self.pool.clients)
        assert all(not client._wakes for client in self.pool.clients)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - conditions on whatever object, so there is no event to wait for
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def rig(
    folder: Path,
    tokenizer: Tokenizer,
    scheduler: ScriptedScheduler | None = None,
    *,
    recovery_timeout_seconds: float = 60.0,
    ready: bool = True,
    max_tokens: int | None = None,
    served: bool = True,
    client_stall_seconds: float = 30.0,
    tenants: str = "",
    tool_call_form: ToolCallForm | None = None,
) -> AsyncIterator[Rig]:
    scheduler = scheduler or ScriptedScheduler()
    async with contextlib.AsyncExitStack() as stack:
        path = folder / "scheduler.sock"
        if served:
            await stack.enter_async_context(serving(scheduler, path))
        client = SchedulerClient(
            Address.parse(f"unix:{path}", field="--scheduler"),
            router_id="router-1",
            tokenizer=TokenizerIdentity(tokenizer.fingerprint, tokenizer.vocab_size),
            recovery_timeout_seconds=recovery_timeout_seconds,
            max_message_bytes=MAX_MESSAGE_BYTES,
            on_serving_changed=lambda: None,
        )
        pool = SchedulerPool([client])
        defaults = Defaults(temperature=0.5, max_tokens=max_tokens)
        model = ServedModel("tiny", tokenizer, defaults, tool_call_form)
        intake = Intake(model=model, schedulers=pool)
        stack.push_async_callback(intake.close)
        doorkeeper = Doorkeeper(tenants)
        servicer = RouterServicer(
            intake=intake,
            schedulers=pool,
            max_message_bytes=MAX_MESSAGE_BYTES,
            doorkeeper=doorkeeper,
            client_stall_seconds=client_stall_seconds,
        )
        door = Door(lambda metadata: doorkeeper.caller(header(metadata, "authorization")))
        server = grpc.aio.server(
            interceptors=[door], options=server_options(max_message_bytes=MAX_MESSAGE_BYTES)
        )
        router_pb2_grpc.add_RouterServicer_to_server(servicer, server)
        address = f"unix:{folder}/router.sock"
        server.add_insecure_port(address)
        stack.push_async_callback(server.stop, 0)
        await server.start()
        running = asyncio.create_task(pool.run())

        async def stop_running() -> None:
            running.cancel()
            await asyncio.wait([running])

        stack.push_async_callback(stop_running)
        channel = connect(Address.parse(address, field=""), max_message_bytes=MAX_MESSAGE_BYTES)
        stack.push_async_callback(channel.close)
        started = Rig(router_pb2_grpc.RouterStub(channel), scheduler, servicer, intake, pool, doorkeeper)
        if ready:
            await started.serving()
        yield started


Start = Callable[..., contextlib.AbstractAsyncContextManager[Rig]]


def letters(text: str) -> Callable[[scheduler_pb2.Submit], list[int]]:
    """A script: every sequence says this text, then the end token."""
    return lambda _submit: [*text.encode(), tiny_model.EOS_ID]

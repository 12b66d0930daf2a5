"""The transport rules of both ends, put side by side."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc.channel import KEEPALIVE_SECONDS, MIN_PING_INTERVAL_SECONDS, server_options
from tests.rpc.conftest import StartGreeter


def test_b80_our_clients_ping_less_often_than_our_servers_allow() -> None:
    assert KEEPALIVE_SECONDS >= 2 * MIN_PING_INTERVAL_SECONDS
    options = dict(server_options(max_message_bytes=1))
    assert options["grpc.keepalive_permit_without_calls"] == 1
    assert options["grpc.http2.min_ping_interval_without_data_ms"] < KEEPALIVE_SECONDS * 1000


def test_b81_a_server_sends_as_much_as_it_takes() -> None:
    options = dict(server_options(max_message_bytes=123))
    assert options["grpc.max_send_message_length"] == options["grpc.max_receive_message_length"] == 123


async def test_b80_a_client_that_pings_too_fast_gets_a_status_and_others_are_not_touched(
    greeter: StartGreeter,
) -> None:
    server = greeter()
    hasty = grpc.aio.insecure_channel(
        server.address,
        options=[
            ("grpc.keepalive_time_ms", 100),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.use_local_subchannel_pool", 1),
        ],
    )
    async with hasty, server.connect() as calm:
        watches = [
            health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="none"))
            for channel in (hasty, calm)
        ]
        for watch in watches:
            await watch.read()
        end = await asyncio.wait_for(watches[0].code(), 20)
        assert end is grpc.StatusCode.UNAVAILABLE
        assert "Too many pings" in await watches[0].details()
        assert not watches[1].done()
        watches[1].cancel()

"""A page that gives its own name this machine's address must not get in."""

import httpx2
import pytest

from router import __main__ as main
from router.config import RouterSettings
from router.http import hosts
from router.http.errors import HttpError
from rpc.errors import StartError
from rpc.settings import load
from tests.router.stack import Start


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8000",
        "LOCALHOST:1",
        "a.localhost",
        "127.0.0.1:8000",
        "[::1]:8000",
        "10.1.2.3",
        "",
    ],
)
def test_localhost_and_addresses_are_answered(host: str) -> None:
    hosts.check([(b"accept", b"*/*"), (b"host", host.encode())])
    hosts.check([])


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io", "[::1", "a:b:c"],
)
def test_other_names_are_refused(host: str) -> None:
    with pytest.raises(HttpError) as refused:
        hosts.check([(b"host", host.encode())])
    assert (refused.value.status, repr(host) in refused.value.message) == (403, True)


def test_a_name_that_the_door_was_given_is_answered() -> None:
    hosts.check([(b"host", b"Router:8000")], ["router"])
    with pytest.raises(HttpError, match="localhost, router and to addresses"):
        hosts.check([(b"host", b"evil.example")], ["router"])


def test_what_a_refusal_advises_would_help() -> None:
    with pytest.raises(HttpError) as bare:
        hosts.check([(b"host", b"evil.example")])
    assert "--http-hosts name this one (or --tenants" in bare.value.message
    with pytest.raises(HttpError) as named:  # with names, --tenants would change nothing
        hosts.check([(b"host", b"evil.example")], ["router"])
    assert "--http-hosts name this one too" in named.value.message
    assert "--tenants" not in named.value.message


@pytest.mark.parametrize(
    "names", ["router:8000", "http://router", "a.example b.example", "a.example,[::1]", ","]
)
def test_a_name_that_no_host_can_be_is_refused_at_the_start(names: str) -> None:
    flags = ["--model", "m", "--scheduler", "unix:/s", "--http-hosts", names]
    with pytest.raises(StartError, match=r"--http-hosts has .*: it must be names without scheme and port"):
        load(RouterSettings, flags, prog="router")


@pytest.mark.parametrize(
    ("listen", "tenants", "names", "status"),
    [
        ("127.0.0.1:0", "", "", 403),
        ("localhost:0", "", "", 403),
        ("0.0.0.0:0", "", "", 200),
        ("127.0.0.1:0", "a file", "", 200),
        ("0.0.0.0:0", "", "router", 403),
        ("0.0.0.0:0", "", "router,Evil.example", 200),
        ("0.0.0.0:0", "", "router, evil.example ,", 200),
        ("127.0.0.1:0", "", " *", 200),
        ("127.0.0.1:0", "", "*", 200),
    ],
)
async def test_a_door_on_this_machine_alone_without_keys_looks_at_names(
    start: Start, listen: str, tenants: str, names: str, status: int
) -> None:
    settings = RouterSettings.model_construct(
        http_hosts=names,
        http=listen,
        tenants=tenants,
        tls_ca="",
        max_request_bytes=1024,
        max_message_bytes=1024,
    )
    async with start() as rig:
        door = main._http_door(rig.intake, rig.pool, settings, rig.doorkeeper, None)
        url = f"http://127.0.0.1:{(await door.open()).rpartition(':')[2]}/health"
        try:
            async with httpx2.AsyncClient() as client:
                assert (await client.get(url)).status_code == 200
                response = await client.get(url, headers={"host": "evil.example"})
        finally:
            await door.stop()
    assert response.status_code == status

"""The metrics port: what a scrape gets, whatever the process is about."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric

from rpc import metrics_door
from rpc.errors import StartError
from rpc.histogram import Histogram
from rpc.metrics import Source, counters, gauge, histogram
from rpc.metrics_door import MetricsDoor
from tests.rig import descriptors
from tests.rig.scrape import get, parsed, scrape


@contextlib.asynccontextmanager
async def opened(listen: str, *sources: Source) -> AsyncIterator[str]:
    door = MetricsDoor(listen, sources)
    address = await door.open()
    try:
        yield address
    finally:
        door.close()
        await door.stop()


def families() -> Iterator[Metric]:
    seconds = Histogram((1000.0, 2000.0))
    seconds.observe(500, times=2)
    seconds.observe(9000)
    yield gauge("seats", "Seats.", 7)
    yield counters("ends", "Ends.", ("why",), {("stop",): 3, ('a "quoted"\n\\ name',): 1})
    yield histogram("time_seconds", "Time.", seconds, 1e-3)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "unix"])
async def test_a_scrape_tells_what_there_is(listen: str, tmp_path: Path) -> None:
    where = f"unix:{tmp_path}/m.sock" if listen == "unix" else listen
    async with opened(where, families) as address:
        told = await asyncio.to_thread(scrape, address)
        status, text = await asyncio.to_thread(get, address, "/nowhere")
    assert told.value("seats") == 7
    assert told.by("ends_total", "why") == {"stop": 3, 'a "quoted"\n\\ name': 1}
    assert told.by("time_seconds_bucket", "le") == {"1.0": 2, "2.0": 2, "+Inf": 3}
    assert (told.value("time_seconds_count"), told.value("time_seconds_sum")) == (3, pytest.approx(10.0))
    assert (status, text) == (404, "metrics are at /metrics\n")


async def test_sources_are_read_on_the_event_loop(tmp_path: Path) -> None:
    loops = []

    def source() -> list[Metric]:
        loops.append(asyncio.get_running_loop())
        return []

    async with opened(f"unix:{tmp_path}/m.sock", source) as address:
        await asyncio.to_thread(scrape, address)
    assert loops == [asyncio.get_running_loop()]


async def test_a_loop_that_stands_still_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_door, "_READ_SECONDS", 0.05)
    async with opened(f"unix:{tmp_path}/m.sock") as address:
        asking = asyncio.ensure_future(asyncio.to_thread(get, address))
        await asyncio.sleep(0)
        time.sleep(1.0)  # noqa: ASYNC251 - this is the loop that stands still
        status, text = await asking
    assert status == 503
    assert text.startswith("the event loop has not answered within")


async def test_a_port_in_use_is_refused_by_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=rf"^--metrics-listen is 127.0.0.1:{port}: the port is in use"):
            async with opened(f"127.0.0.1:{port}"):
                pass


async def test_a_scraper_that_says_nothing_holds_up_nobody(tmp_path: Path) -> None:
    async with opened(f"unix:{tmp_path}/m.sock") as address:
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(f"{tmp_path}/m.sock")
            assert (await asyncio.to_thread(scrape, address)).value("build_info") == 1


def test_the_reader_of_these_tests_sees_faults() -> None:
    with pytest.raises(AssertionError, match="negative"):
        parsed("# TYPE chairlift_x gauge\nchairlift_x -1\n")


async def test_a_scraper_for_whom_no_descriptor_is_left_costs_nothing_and_is_answered_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tries = 0
    get_request = metrics_door._Server.get_request

    def counted(server: metrics_door._Server) -> object:
        nonlocal num_tries
        num_tries += 1
        return get_request(server)

    monkeypatch.setattr(metrics_door._Server, "get_request", counted)
    monkeypatch.setattr(metrics_door._Server, "full_seconds", 0.1)
    async with opened(f"unix:{tmp_path}/m.sock", families):
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as scraper:
            with descriptors.none_left():
                scraper.connect(f"{tmp_path}/m.sock")
                scraper.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                begun = time.monotonic()
                async with asyncio.timeout(20):
                    while num_tries < 2:  # noqa: ASYNC110 - the server's thread counts
                        await asyncio.sleep(0.05)
                seconds = time.monotonic() - begun
            assert num_tries <= 4 + seconds / 0.1, "it rests between its tries"
            scraper.settimeout(20)
            assert (await asyncio.to_thread(scraper.recv, 64)).startswith(b"HTTP/1.0 200")

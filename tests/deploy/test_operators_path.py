"""A new operator's first loss: an executor is killed, and page, alerts and log all say so; then it is back.

What docs/quickstart.md does with containers, here with processes: a real Prometheus with our alerts scrapes
them, and somebody looks at the page and rides.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import httpx2
import pytest

from tests.deploy.test_prometheus import RULES, SERVICES, Prometheus, promtool
from tests.integration.prompts import sized
from tests.rig import cluster
from tests.rig.cluster import Cluster
from tests.rig.scripted_executor import Script

SECONDS = 60.0


class Page:
    """The live page's stream, as its script reads it: the newest word on whether requests are taken."""

    def __init__(self, url: str) -> None:
        self.refusal: str | None = "nothing read yet"
        self.executors: set[str] = set()
        self._client = httpx2.Client(base_url=url, timeout=httpx2.Timeout(SECONDS))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with (
            contextlib.suppress(httpx2.TransportError),  # the router is ended with the test
            self._client.stream("GET", "/live") as response,
        ):
            for line in response.iter_lines():
                for frame in json.loads(line.removeprefix("data: ")) if line else []:
                    if "stats" in frame:
                        self.refusal = frame["stats"]["refusal"]
                    elif "executor" in frame:
                        self.executors.add(frame["executor"])


class Targets:
    """Where Prometheus looks; a process that is started again has another port."""

    def __init__(self, running: Cluster, folder: Path) -> None:
        self._running = running
        self._file = folder / "targets.json"
        self._addresses: dict[str, str] = {}
        self.http = ""

    @property
    def config(self) -> str:
        return (
            "global: {scrape_interval: 250ms, scrape_timeout: 250ms, evaluation_interval: 250ms}\n"
            f"rule_files: ['{RULES}']\n"
            "scrape_configs: [{job_name: chairlift, file_sd_configs: "
            f"[{{files: ['{self._file}'], refresh_interval: 250ms}}], "
            "relabel_configs: [{source_labels: [tier], target_label: job, replacement: 'chairlift-$1'}]}]\n"
        )

    def look_up(self, name: str) -> None:
        """The doors that a process announces on its stdout."""
        for _ in range(2 if name == "router" else 1):
            door, _, address = self._running.process(name).next_line().partition(" on ")
            if door == "http":
                self.http = f"http://{address}"
            else:
                self._addresses[name] = address
        targets = [
            {"targets": [address], "labels": {"tier": tier}} for tier, address in self._addresses.items()
        ]
        self._file.write_text(json.dumps(targets))


def until(what: str, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.fixture
def running(tiny_model_folder: Path) -> Iterator[Cluster]:
    flags = ("--metrics-listen", "127.0.0.1:0")
    with cluster.assembling(tiny_model_folder) as one:
        one.start_scripted_executor(Script(step_seconds=0.01), *flags)
        one.start_scheduler(*flags)
        one.start_router("--http", "127.0.0.1:0", *flags)
        one.wait()
        yield one


@promtool
@pytest.mark.soak
def test_a_killed_executor_is_seen_on_the_page_in_the_alerts_and_in_the_log(
    running: Cluster, tmp_path: Path
) -> None:
    targets = Targets(running, tmp_path)
    for name in SERVICES:
        targets.look_up(name)
    config = tmp_path / "prometheus.yaml"
    config.write_text(targets.config)
    prometheus = Prometheus(config, tmp_path / "data")

    def alerts() -> dict[str, str]:
        told = prometheus.answer("/api/v1/alerts")["data"]["alerts"]
        return {alert["labels"]["alertname"]: alert["state"] for alert in told}

    def are_up() -> list[str]:
        active = prometheus.answer("/api/v1/targets")["data"]["activeTargets"]
        return sorted(target["labels"]["job"] for target in active if target["health"] == "up")

    everybody = [f"chairlift-{name}" for name in sorted(SERVICES)]
    try:
        page = Page(targets.http)
        until("all are scraped", lambda: are_up() == everybody)
        until("the page says that all is well", lambda: page.refusal is None)
        rider: SimpleQueue[int] = SimpleQueue()

        def ride() -> None:
            for event in running.router.Generate(sized(8, 600), timeout=SECONDS):
                for token_id in event.delta.token_ids:
                    rider.put(token_id)

        riding = threading.Thread(target=ride)
        riding.start()
        until("somebody rides", lambda: rider.qsize() > 3)
        executor = running.address("executor")
        until("the page shows it", lambda: executor in page.executors)
        assert alerts() == {}

        running.kill("executor")
        until("the page says why nothing is taken", lambda: executor in (page.refusal or ""))
        until("the loss is an alert", lambda: alerts().get("ChairliftExecutorLost") == "firing")
        soon = {"ChairliftProcessDown", "ChairliftNoExecutor", "ChairliftNotServing"}
        until("the rest is pending", lambda: soon <= alerts().keys())
        log = running.process("scheduler").stderr
        (lost,) = (json.loads(line) for line in log.splitlines() if '"executor_lost"' in line)
        assert (lost["executor"], lost["is_crash"]) == (executor, True)

        running.restart("executor")
        targets.look_up("executor")
        until("the page says that all is well again", lambda: page.refusal is None)
        riding.join(SECONDS)
        assert rider.qsize() == 600
        until("it is scraped again", lambda: are_up() == everybody)
        until("nothing is pending", lambda: alerts() == {"ChairliftExecutorLost": "firing"})
    finally:
        prometheus.close()

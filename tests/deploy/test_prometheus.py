"""Alerts and dashboard: valid by promtool's word, and about metrics that a running server has."""

import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import yaml

from tests.integration.prompts import sized
from tests.rig import cluster
from tests.rig.cluster import Cluster
from tests.rig.scrape import get, parsed

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES, DASHBOARD = DEPLOY / "prometheus" / "alerts.yaml", DEPLOY / "grafana" / "chairlift.json"
SERVICES = ("router", "scheduler", "executor")
OF_PROMETHEUS = {
    "up",
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "process_open_fds",
    "process_max_fds",
}
promtool = pytest.mark.skipif(
    shutil.which("promtool") is None or shutil.which("prometheus") is None,
    reason="promtool and prometheus are not installed (Debian: apt-get install prometheus)",
)


def tool(*arguments: str, given: str | None = None) -> str:
    done = subprocess.run(
        ["promtool", *arguments], input=given, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def dashboard_expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\b(?:chairlift|process)_\w+", text))


@pytest.fixture(scope="module")
def running(tiny_model_folder: Path) -> Iterator[tuple[Cluster, dict[str, str]]]:
    """A server that has answered one request, and where its processes tell their metrics."""
    flags = ("--metrics-listen", "127.0.0.1:0")
    with cluster.running(
        tiny_model_folder, executor_flags=flags, scheduler_flags=flags, router_flags=flags
    ) as one:
        where = {name: one.process(name).next_line().removeprefix("metrics on ") for name in SERVICES}
        one.router.Complete(sized(20, 8), timeout=30)
        yield one, where


@promtool
def test_the_rules_are_valid_and_do_what_they_say() -> None:
    tool("check", "rules", str(RULES))
    for config in ("prometheus.yaml", "compose.yaml"):
        tool("check", "config", str(DEPLOY / "prometheus" / config))
    tool("test", "rules", str(DEPLOY / "prometheus" / "alerts_test.yaml"))


def test_every_alert_fires_in_a_history_whose_series_have_the_labels_that_scrapes_give() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    histories = yaml.safe_load((DEPLOY / "prometheus" / "alerts_test.yaml").read_text())["tests"]
    cases = [case for history in histories for case in history["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == alerts
    for history in histories:
        for given in history["input_series"]:
            assert {"job", "instance"} <= set(re.findall(r'(\w+)="', given["series"])), given["series"]


@promtool
def test_the_scrape_config_for_kubernetes_is_valid_but_for_the_discovery_that_debian_leaves_out(
    tmp_path: Path,
) -> None:
    config, discovery = (DEPLOY / "prometheus" / "kubernetes.yaml").read_text(), "kubernetes_sd_configs:"
    assert config.count(discovery) == 1
    static = config.replace(f"{discovery} [{{role: pod}}]", "static_configs: [{targets: [pod]}]")
    (tmp_path / "kubernetes.yaml").write_text(static.replace("alerts.yaml", str(RULES)))
    tool("check", "config", str(tmp_path / "kubernetes.yaml"))


@promtool
def test_what_processes_tell_is_as_prometheus_wants_it(running: tuple[Cluster, dict[str, str]]) -> None:
    for address in running[1].values():
        status, text = get(address)
        assert status == 200
        tool("check", "metrics", given=text)


def test_dashboard_and_alerts_speak_of_metrics_that_there_are(
    running: tuple[Cluster, dict[str, str]],
) -> None:
    told = {name for address in running[1].values() for name in parsed(get(address)[1]).names}
    rules = re.sub(r"description:.*|alert:.*|record:.*", "", RULES.read_text())
    wanted = names_in(rules) | names_in("\n".join(dashboard_expressions()))
    told |= {"chairlift_http_responses_total"}  # where there is an HTTP door
    assert wanted <= told | OF_PROMETHEUS


def test_the_docs_name_metrics_that_there_are_and_words_that_services_log(
    running: tuple[Cluster, dict[str, str]],
) -> None:
    told = {name for address in running[1].values() for name in parsed(get(address)[1]).names}
    told |= {re.sub(r"_(bucket|sum|count)$", "", name) for name in told} | {"chairlift_http_responses_total"}
    root = DEPLOY.parent
    symptoms = (root / "docs" / "operations.md").read_text().partition("## By symptom")[2]
    symptoms = symptoms.partition("\n## ")[0]
    listed = (root / "docs" / "metrics.md").read_text().partition("## What there is")[2].partition("\n## ")[0]
    code = "\n".join(
        path.read_text() for package in ("rpc", *SERVICES) for path in (root / package).rglob("*.py")
    )
    wanted = re.findall(r"`([a-z]+_[a-z_]+)(?:\{[^`]*\})?`", symptoms + listed)
    others = {name for name in wanted if f"chairlift_{name}" not in told and name not in OF_PROMETHEUS}
    assert len(wanted) > 40
    assert [name for name in others if not re.search(rf"\b{name}\b", code)] == []
    assert not [name for name in others if name.endswith(("_total", "_seconds", "_ratio"))]


class Prometheus:
    """A Prometheus of the test's own, on a free port that it tells in its log."""

    def __init__(self, config: Path, data: Path) -> None:
        self._process = subprocess.Popen(
            [
                "prometheus", f"--config.file={config}", f"--storage.tsdb.path={data}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        told: SimpleQueue[str] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(told,))
        self._reader.start()
        self.address = told.get(timeout=30)
        assert told.get(timeout=30) == "ready"

    def _read(self, told: "SimpleQueue[str]") -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            found = re.search(r'msg="Listening on" address=(\S+)', line)
            if found:
                told.put(found[1])
            elif "Server is ready" in line:
                told.put("ready")

    def answer(self, path: str) -> Any:
        return json.loads(get(self.address, path)[1])

    def close(self) -> None:
        self._process.kill()
        self._process.wait(20)
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()


@promtool
def test_every_panel_and_rule_can_be_asked_of_a_running_server(
    running: tuple[Cluster, dict[str, str]], tmp_path: Path
) -> None:
    jobs = "".join(
        f'  - {{job_name: chairlift-{name}, static_configs: [{{targets: ["{address}"]}}]}}\n'
        for name, address in running[1].items()
    )
    config = tmp_path / "prometheus.yaml"
    config.write_text(
        "global: {scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 500ms}\n"
        f"rule_files: ['{RULES}']\nscrape_configs:\n{jobs}"
    )
    prometheus = Prometheus(config, tmp_path / "data")
    try:
        deadline = time.monotonic() + 30
        while True:
            targets = prometheus.answer("/api/v1/targets")["data"]["activeTargets"]
            groups = prometheus.answer("/api/v1/rules")["data"]["groups"]
            rules = [rule for group in groups for rule in group["rules"]]
            are_up = len(targets) == 3 and all(target["health"] == "up" for target in targets)
            if are_up and rules and all(rule["health"] == "ok" for rule in rules):
                break
            assert time.monotonic() < deadline, (targets, rules)
            time.sleep(0.1)
        assert not [rule["name"] for rule in rules if rule.get("state") == "firing"], "it is well"
        for expression in dashboard_expressions():
            asked = expression.replace("$__rate_interval", "5m")
            tool("query", "instant", f"http://{prometheus.address}", asked)
        (serving,) = prometheus.answer("/api/v1/query?query=chairlift_router_serving")["data"]["result"]
        assert serving["value"][1] == "1"
    finally:
        prometheus.close()

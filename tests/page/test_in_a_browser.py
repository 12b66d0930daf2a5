"""The live page in a headless Chromium, where there is one, and an npm that can install what drives it."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.rig import cluster
from tests.rig.client import request
from tests.rig.cluster import Cluster
from tests.rig.scripted_executor import Script

HERE = Path(__file__).parent
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
SECONDS = 200

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(BROWSER is None, reason="there is no chromium here"),
    pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm here"),
]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script and what it imports."""
    folder = tmp_path_factory.mktemp("page")
    for name in ("package.json", "look.mjs", "outage.mjs"):
        shutil.copy(HERE / name, folder)
    installing = ("npm", "install", "--no-audit", "--no-fund", "--ignore-scripts")
    installed = subprocess.run(installing, cwd=folder, capture_output=True, timeout=SECONDS, check=False)
    if installed.returncode != 0:
        pytest.skip(f"npm cannot install here: {installed.stderr.decode()[-200:]}")
    return folder


@pytest.fixture(scope="module")
def server(tiny_model_folder: Path) -> Iterator[Cluster]:
    with cluster.assembling(tiny_model_folder) as running:
        for name in ("executor", "executor-2"):  # not too quick to be seen
            running.start_scripted_executor(Script(max_num_seqs=8, step_seconds=0.03), name=name)
        running.start_scheduler(executors=("executor", "executor-2"))
        running.start_router("--http", "127.0.0.1:0")
        running.wait()
        yield running


def http_url(server: Cluster) -> str:
    return "http://" + server.process("router").next_line().removeprefix("http on ")


@pytest.fixture(scope="module")
def url(server: Cluster) -> str:
    return http_url(server)


Look = Callable[..., dict[str, Any]]


@pytest.fixture
def look(request: pytest.FixtureRequest, driver: Path) -> Look:
    """Opens the page; `--artefacts` keeps a picture of it under the test's own name."""
    folder = request.config.getoption("--artefacts")
    name = request.node.name.removeprefix("test_")
    return partial(_look, driver=driver, keep_as=folder and folder / f"{name}.png")


def _look(url: str, *more: str, driver: Path, keep_as: Path | None) -> dict[str, Any]:
    assert BROWSER is not None
    done = subprocess.run(
        ["node", "look.mjs", url, BROWSER, str(driver), *more],
        cwd=driver,
        capture_output=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    if keep_as is not None:
        keep_as.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(driver / f"{more[0]}.png", keep_as)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_prompt_rides_and_its_story_can_be_read(url: str, look: Look, driver: Path) -> None:
    seen = look(url, "light", "2")
    assert seen["errors"] == []
    assert seen["serious"] == []
    assert len(seen["origins"]) == 1  # nothing is asked of anybody else
    assert seen["answer"].startswith("Rider 0")
    assert "tokens in" in seen["state"]
    assert {"prefill", "decode"} <= set(seen["story"])
    assert seen["frozen"] == "true"
    assert (driver / "light.png").stat().st_size > 10_000


def test_two_executors_stand_side_by_side_in_the_dark(url: str, look: Look) -> None:
    """Twelve choices need both: each has eight seats."""
    seen = look(url, "dark", "12")
    assert seen["errors"] == []
    assert seen["serious"] == []
    assert seen["lifts"] == 2


def test_an_outage_is_told_in_words_and_so_is_its_end(server: Cluster, url: str, driver: Path) -> None:
    assert BROWSER is not None
    command = ["node", "outage.mjs", url, BROWSER]
    with subprocess.Popen(command, cwd=driver, stdout=subprocess.PIPE, text=True) as looking:
        try:
            assert looking.stdout is not None
            assert looking.stdout.readline() == "good: serving\n"
            for name in ("executor", "executor-2"):
                server.kill(name)
            told = looking.stdout.readline()
            assert told.startswith("bad: not serving: scheduler ")
            assert server.address("executor-2") in told
            for name in ("executor", "executor-2"):
                server.restart(name)
            assert looking.stdout.readline() == "good: serving\n"
        finally:
            looking.kill()


@pytest.mark.soak
def test_256_seats_are_still_a_moving_picture(tiny_model_folder: Path, look: Look) -> None:
    with cluster.assembling(tiny_model_folder) as running:
        running.start_scripted_executor(Script(num_blocks=100_000, max_num_seqs=256, step_seconds=0.01))
        running.start_scheduler()
        running.start_router("--http", "127.0.0.1:0")
        running.wait()
        calls = [  # all seats but one, which is the page's
            running.router.Generate(request([i, 7, 9], max_tokens=5000, n=15, ignore_eos=True))
            for i in range(17)
        ]
        for call in calls:
            next(iter(call))
        seen = look(http_url(running), "light", "1", "10")
        assert seen["framesPerSecond"] >= 30

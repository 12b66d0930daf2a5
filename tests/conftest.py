"""Fixtures of every test: the tiny model, the oracle, and what the processes of a failing test had to say."""

import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.rig import cluster, tiny_model
from tests.rig.oracle import Oracle

# Read when triton is imported, whoever imports it first: its kernels run on the CPU then, slowly.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Under nohup it is ignored, by every process that is started too; whoever tests that says so.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# How long an example takes says how busy the machine is, and nothing of the law. A law that needs more
# examples says so.
settings.register_profile(
    "drawn", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
# A change is judged on the same examples each time; people and `make soak` draw new ones.
settings.register_profile("ci", settings.get_profile("drawn"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "drawn")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak-minutes", type=float, default=60.0, help="How long the soak of mixed traffic lasts."
    )
    parser.addoption("--artefacts", type=Path, help="A folder in which pictures of the live page are kept.")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile` the files are handed out in an order of our own."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.rig.distribution import LongestFirst

    return LongestFirst(config, log)


def pytest_collection_finish() -> None:
    # Collected tests live to the end: thousands of them are not looked through for garbage again and again.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny float32 model of the rig: one byte is one token."""
    return tiny_model.build(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def tiny_oracle(tiny_model_folder: Path) -> Oracle:
    """What the tiny model says when it is asked alone."""
    return Oracle(tiny_model_folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failing test shows the logs of the clusters that run beside it."""
    report = yield
    if report.failed:
        report.sections += [(f"processes in {one.folder}", one.logs()) for one in cluster.LIVE]
    return report

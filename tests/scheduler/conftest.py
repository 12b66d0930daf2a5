"""A running scheduler, with and without its executor."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.scheduler.shell import ObedientExecutor, Shell, running_shell, serving_executor


@pytest.fixture
async def shell() -> AsyncIterator[Shell]:
    """A scheduler whose executor is not there yet."""
    async with running_shell() as running:
        yield running


@pytest.fixture
async def executor(shell: Shell) -> AsyncIterator[ObedientExecutor]:
    """The executor that `shell` waits for."""
    obedient = ObedientExecutor()
    async with serving_executor(obedient, shell.executor_address):
        yield obedient


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """For sockets: a path of theirs has at most 107 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)

"""A running scheduler, with and without its executor."""

from collections.abc import AsyncIterator

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

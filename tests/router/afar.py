"""What sends a door many inputs: hypothesis draws them, in a process of its own for the long forms."""

import asyncio
import sys
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

Test = Callable[..., None]


def drawn(num_inputs: int, start: int, **inputs: "SearchStrategy[Any]") -> Callable[[Test], Test]:
    """So many inputs from this seed, however long each takes; one that fails is shown as it is."""

    def decorated(test: Test) -> Test:
        limits = settings(
            max_examples=num_inputs,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        return seed(start)(limits(given(**inputs)(test)))

    return decorated


async def number_told_by(module: str, *arguments: object) -> int:
    """What a module of the tests prints when it is run with these arguments."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *map(str, arguments)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    told, failed = await process.communicate()
    assert process.returncode == 0, (module, arguments, failed.decode()[-20_000:])
    return int(told)

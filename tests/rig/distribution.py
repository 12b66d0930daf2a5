"""Which of pytest-xdist's workers runs what: a file is one worker's, and the longest begin.

One that began last would have its worker run on alone. Which are long is written down here, as measured; what
is wrong in it costs time, and nothing else. A file whose tests share no fixture that is dear may be divided.
"""

from collections import OrderedDict
from typing import Any, Final

from xdist.scheduler import LoadFileScheduling

SECONDS: Final = {  # of a processor, in files that take ten of them or more
    "tests/simulation/test_scenario.py": 115,
}
DIVIDED: Final = frozenset({"tests/simulation/test_scenario.py"})


class LongestFirst(LoadFileScheduling):  # type: ignore[misc]
    """`--dist loadfile` in another order, and with some files divided."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.workqueue = Queue()

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


class Queue(OrderedDict[str, dict[str, bool]]):
    """Units of work by name, each with its tests. The longest is taken first; of those alike the oldest."""

    def popitem(self, last: bool = True) -> tuple[str, dict[str, bool]]:
        unit = max(self, key=lambda unit: SECONDS.get(_file_of(unit), 0))
        return unit, self.pop(unit)


def unit_of(nodeid: str) -> str:
    """Name of what is one worker's whole: the test's file, or the test itself."""
    file = _file_of(nodeid)
    return nodeid if file in DIVIDED else file


def _file_of(nodeid: str) -> str:
    return nodeid.split("::", 1)[0]

"""Which of pytest-xdist's workers runs what: a file is one worker's, and the longest begin.

One that began last would have its worker run on alone. Which are long is written down here, as measured; what
is wrong in it costs time, and nothing else. A file whose tests share no fixture that is dear may be divided.
"""

from collections import OrderedDict
from typing import Any, Final

from xdist.scheduler import LoadFileScheduling

SECONDS: Final = {  # alone on its worker, about; files of less than fifteen are not here
    "tests/simulation/test_scenario.py": 115,
    "tests/integration/test_oracle.py": 60,
    "tests/chairlift/test_serve.py": 55,
    "tests/router/http/test_texts.py": 50,
    "tests/executor/test_operations_fused.py": 40,
    "tests/scheduler/test_core_machine.py": 35,
    "tests/examples/test_examples.py": 35,
    "tests/integration/test_preemption.py": 35,
    "tests/executor/test_operations_filter.py": 35,
    "tests/scheduler/test_policy_core.py": 30,
    "tests/scheduler/test_fairness.py": 30,
    "tests/docs/test_commands.py": 30,
    "tests/chairlift/test_demo.py": 30,
    "tests/integration/test_model_files.py": 30,
    "tests/executor/test_damaged_files.py": 25,
    "tests/rpc/test_server.py": 20,
    "tests/executor/test_runner.py": 20,
    "tests/scheduler/test_waiting.py": 20,
    "tests/integration/test_tensor_parallel.py": 20,
    "tests/router/http/test_app.py": 20,
    "tests/gpu/test_check.py": 20,
    "tests/scheduler/test_entrance.py": 15,
    "tests/gpu/test_executor_part.py": 15,
    "tests/chairlift/test_refusal_checks.py": 15,
    "tests/executor/test_row_invariance.py": 15,
    "tests/router/http/test_openapi.py": 15,
    "tests/router/http/test_cases_at_every_door.py": 15,
    "tests/chairlift/test_sampling_checks.py": 15,
    "tests/page/test_in_a_browser.py": 15,
    "tests/chairlift/test_conformance.py": 15,
    "tests/executor/test_quantization.py": 15,
    "tests/integration/test_executors_fail.py": 15,
    "tests/integration/test_overload.py": 15,
    "tests/chairlift/lab/test_replay.py": 15,
    "tests/integration/test_progress.py": 15,
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

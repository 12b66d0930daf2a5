"""`python -m tests.simulation SEED`: the whole trace of one run."""

import logging
import sys

import structlog

from tests.simulation.scenario import Scenario
from tests.simulation.world import SimulationError


def main(seed: int) -> int:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    scenario = Scenario(seed)
    failure = ""
    try:
        scenario.run()
    except SimulationError as error:
        failure = str(error).splitlines()[0]
    print("\n".join(scenario.world.trace))  # noqa: T201 - what the command is for
    print(failure or f"digest {scenario.world.digest}")  # noqa: T201
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))

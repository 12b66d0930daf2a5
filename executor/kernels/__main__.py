"""`python -m executor.kernels`: builds the kernels for every instruction set, for images without compiler.

An older compiler does not know the newest sets: what it can build is built, and an executor takes the
fastest of those that its processor has.
"""

import platform
import sys

import structlog

from executor.kernels.build import INSTRUCTION_SETS, KernelsUnavailableError, built


def main() -> int:
    """Builds what is not there yet, prints where it is, and returns the exit code: 1 if that is nowhere."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if platform.machine() != "x86_64":
        print("executor.kernels: none are for this processor", file=sys.stderr)  # noqa: T201 - the reason
        return 0
    num_built = 0
    for each in INSTRUCTION_SETS:
        try:
            print(built(each))  # noqa: T201 - the answer
            num_built += 1
        except KernelsUnavailableError as error:
            print(f"executor.kernels: {each.name}: {error}", file=sys.stderr)  # noqa: T201 - the reason
    return 0 if num_built else 1


if __name__ == "__main__":
    sys.exit(main())

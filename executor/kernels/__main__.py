"""`python -m executor.kernels`: builds the kernels for every instruction set, for images without compiler."""

import sys

import structlog

from executor.kernels.build import INSTRUCTION_SETS, KernelsUnavailableError, built


def main() -> int:
    """Builds what is not there yet, prints where it is, and returns the exit code."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    try:
        print(*(built(each) for each in INSTRUCTION_SETS), sep="\n")  # noqa: T201 - the answer
    except KernelsUnavailableError as error:
        print(f"executor.kernels: {error}", file=sys.stderr)  # noqa: T201 - the reason
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

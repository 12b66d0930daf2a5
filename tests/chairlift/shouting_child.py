"""A child whose output has lines of many megabytes: on both streams, each with a short one behind it."""

import os
import sys

LONG_BYTES = 20 * 1024 * 1024


def main() -> None:
    sys.stdout.write("listening on unix:/nowhere.sock\n")
    for stream in (sys.stdout, sys.stderr):
        stream.write("x" * LONG_BYTES + "\n")
        stream.write("short\n" * 3)
        stream.flush()
    sys.stderr.write("no end")
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

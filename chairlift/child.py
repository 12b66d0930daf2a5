"""`python -m chairlift.child PARENT MODULE …`: runs a module whose process ends with its parent.

Linux sends the death signal however the parent dies: nothing is polled, and kill -9 leaves no orphan. The
child asks for it itself, after the exec: between fork and exec, locks may be held by threads that are gone.
"""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """From now on this process is killed when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(argv: list[str]) -> None:
    """Binds this process to the life of process `argv[0]`, then runs module `argv[1]` with the rest."""
    parent, module = int(argv[0]), argv[1]
    end_with_parent()
    if os.getppid() != parent:  # it died before the signal was armed
        sys.exit(f"chairlift: the process {parent} that started the {module} is gone")
    sys.argv[1:] = argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])

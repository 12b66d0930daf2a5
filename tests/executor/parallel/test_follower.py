import subprocess
import sys

SCRIPT = """
import os, signal
from executor.parallel.follower import follow
from executor.parallel.place import place_of
def steps():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(os.getpid(), number)
    print("it computes on")
raise SystemExit(follow(place_of(1, {}), steps))
"""


def test_what_ends_a_service_is_left_to_the_first_rank() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "it computes on\n"), done.stderr

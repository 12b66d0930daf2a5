import json
import subprocess
import sys

import pytest

LINES = """
import asyncio, logging, structlog
from rpc import log
log.configure("lift", fmt={fmt!r}, level="info")
structlog.contextvars.bind_contextvars(request_id="r-1", step_id=7)
logger = structlog.get_logger()
logger.debug("unseen")
logger.info("running", seats=4)
logging.getLogger("other.library").warning("hello %s", "there")
def work():
    prompt = "the secret prompt"
    raise ValueError("two\\nlines")
try:
    work()
except ValueError:
    logger.exception("failed")
    logging.getLogger("other.library").exception("failed too")
"""


def written(fmt: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", LINES.format(fmt=fmt)], capture_output=True, text=True, check=True
    )
    assert not done.stdout
    return done.stderr.splitlines()


def test_json_is_one_object_a_line_with_service_and_context_even_for_exceptions() -> None:
    lines = [json.loads(line) for line in written("json")]
    assert [line["event"] for line in lines] == ["running", "hello there", "failed", "failed too"]
    for line in lines:
        assert line["service"] == "lift"
        assert line["request_id"] == "r-1"
        assert line["step_id"] == 7
        assert line["timestamp"].endswith("Z")
    assert lines[0]["seats"] == 4
    assert lines[2]["exception"][0]["exc_value"] == "two\nlines"


@pytest.mark.parametrize("fmt", ["json", "console"])
def test_a_traceback_never_shows_local_variables(fmt: str) -> None:
    text = "\n".join(written(fmt))
    assert "ValueError" in text
    assert "the secret prompt" not in text
    assert "unseen" not in text


FULL = """
import sys, structlog
from rpc import line_writer, log
line_writer.MAX_WAITING_CHARACTERS = 200_000  # more than a pipe holds
line_writer.FLUSH_SECONDS = 20.0
log.configure("lift", fmt="json", level="info")
for number in range(400):
    structlog.get_logger().info("x" * 1000, number=number)
print("logged", flush=True)
sys.stdin.readline()
assert log.flush()
structlog.get_logger().info("again")
"""


def test_who_logs_waits_for_no_reader_and_the_log_tells_of_the_gap_when_it_goes_on() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FULL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "logged\n"  # and nobody has read a line
        lines = [json.loads(line) for line in process.communicate("\n")[1].splitlines()]
        assert process.returncode == 0
    gaps = [line["num_lines"] for line in lines if line["event"] == "log_lines_dropped"]
    numbers = [line["number"] for line in lines if "number" in line]
    assert numbers == sorted(set(numbers))
    assert gaps
    assert len(numbers) + sum(gaps) == 400
    assert [line["event"] for line in lines[-2:]] == ["log_lines_dropped", "again"]


def test_a_process_whose_log_nobody_reads_ends() -> None:
    script = FULL.replace("assert log.flush()", "assert not log.flush()").replace("sys.stdin.readline()", "")
    script = script.replace("FLUSH_SECONDS = 20.0", "FLUSH_SECONDS = 0.1")
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) as process:
        assert process.wait(30) == 0


def test_a_line_beyond_the_bound_is_counted_and_the_log_goes_on() -> None:
    script = """
import structlog
from rpc import line_writer, log
line_writer.MAX_WAITING_CHARACTERS = 1000
log.configure("lift", fmt="json", level="info")
logger = structlog.get_logger()
for event in ("before", "x" * 1000, "after", "y" * 1000, "z" * 1000):
    assert log.flush()  # the writer has nothing to do
    logger.info(event)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    dropped = "log_lines_dropped"
    assert [line["event"] for line in lines] == ["before", dropped, "after", dropped, dropped]
    assert [line["num_lines"] for line in lines if line["event"] == dropped] == [1, 1, 1]


UNCAUGHT = """
import threading, structlog
from rpc import line_writer, log, server
line_writer.FLUSH_SECONDS = {flush_seconds}
class Late:
    def __del__(self):
        raise ValueError("three")
async def service():
    log.configure("lift", fmt="json", level="info")
    for number in range({num_lines}):
        structlog.get_logger().info("x" * 1000)
    thread = threading.Thread(target=lambda: 1 / 0, name="worker")
    thread.start()
    thread.join()
    Late()
    raise ValueError("a defect")
server.main("lift", service)
"""


def test_an_exception_that_nobody_caught_is_the_last_line_of_the_log() -> None:
    script = UNCAUGHT.format(flush_seconds=20.0, num_lines=3)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 1
    assert [line["event"] for line in lines[3:]] == ["thread_failed", "exception_ignored", "failed"]
    assert lines[3]["thread"] == "worker"
    assert "Late.__del__" in lines[4]["where"]
    assert lines[5]["exception"][0]["exc_value"] == "a defect"


def test_a_service_that_ends_with_a_defect_ends_whoever_reads_its_log() -> None:
    script = UNCAUGHT.format(flush_seconds=0.1, num_lines=300)  # more than a pipe holds
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) as process:
        assert process.wait(30) == 1

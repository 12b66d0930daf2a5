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

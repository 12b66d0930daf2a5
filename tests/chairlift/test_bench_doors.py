import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from chairlift.bench_doors import read_events
from chairlift.results import ChairliftError


async def test_events_of_a_stream_are_read_and_tokens_counted_by_the_usage() -> None:
    async def events(*chunks: Any) -> AsyncIterator[str]:
        for chunk in chunks:
            yield f"data: {json.dumps(chunk)}"
            yield ""
        yield ": a comment"
        yield "data: [DONE]"

    arrivals: list[int] = []
    text = [{"choices": [{"text": "ab"}], "usage": None}, {"choices": [{"text": ""}]}]
    usage: dict[str, Any] = {"completion_tokens": 7}
    last = {"choices": [], "usage": usage}
    counts = await read_events(events(*text, *text, last), lambda: arrivals.append(1))
    assert counts == (7, None)
    assert len(arrivals) == 2
    assert await read_events(events(*text), lambda: None) == (1, None)
    for details, found in ((None, None), ({"cached_tokens": 4}, 4)):
        usage["prompt_tokens_details"] = details
        assert await read_events(events(*text, last), lambda: None) == (7, found)
    with pytest.raises(ChairliftError, match="too long"):
        await read_events(events({"error": {"message": "too long"}}), lambda: None)

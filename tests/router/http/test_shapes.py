import json
from pathlib import Path

import pytest

from router import model_files
from router.tokenizer import Tokenizer
from tests.rig import tiny_model
from tests.rig.scripted_scheduler import ScriptedScheduler
from tests.router.http.test_app import Serve, events, serve
from tests.router.http.test_schemas import is_valid
from tests.router.stack import letters

__all__ = ["serve"]  # the fixture
ARGUMENTS = '{"city": "Zürich"}'
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """The tiny model's, with a template that knows tools."""
    folder = tiny_model.build(tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ tools | tojson }}" + tiny_model.CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(model_files.read(folder))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_forced_function_is_answered_as_a_call_whole_and_streamed(
    serve: Serve, choice: object
) -> None:
    scheduler = ScriptedScheduler(script=letters(ARGUMENTS))
    assert scheduler.welcome is not None
    scheduler.welcome.features.append("constraints")
    finish_reason = "tool_calls" if choice == "required" else "stop"
    async with serve(scheduler) as rig:
        asked = {"messages": [{"role": "user", "content": "Hi"}], "tools": [WEATHER], "tool_choice": choice}
        (whole,) = (await rig.post("/v1/chat/completions", **asked)).json()["choices"]
        (call,) = whole["message"]["tool_calls"]
        assert whole["message"]["content"] is None
        assert call["function"] == {"name": "weather", "arguments": ARGUMENTS}
        assert whole["finish_reason"] == finish_reason
        assert rig.scheduler.submits[-1].sampling.json_schema == '{"type": "object"}'
        chunks = events((await rig.post("/v1/chat/completions", stream=True, **asked)).text)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
        assert calls[0]["function"]["name"] == "weather"
        assert "".join(call["function"]["arguments"] for call in calls) == ARGUMENTS
        assert choices[-1]["finish_reason"] == finish_reason
        assert is_valid("ChatChoice", whole)
        assert all(is_valid("ChatChunkChoice", choice) for choice in choices)


async def test_the_shape_of_a_call(tokenizer: Tokenizer) -> None:
    from router.http.shapes import CallShape

    shape = CallShape(tokenizer, function="weather", call_id="call_1", stop_word="tool_calls")
    message = shape.whole(0, ARGUMENTS)["message"]
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert call == {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": ARGUMENTS},
    }
    opening = shape.opening(0)
    assert opening is not None
    pieces = [shape.piece(ARGUMENTS[:5]), shape.piece(ARGUMENTS[5:])]
    deltas = [opening["delta"], *(piece["delta"] for piece in pieces)]
    joined = "".join(delta["tool_calls"][0]["function"]["arguments"] for delta in deltas)
    assert (joined, {delta["tool_calls"][0]["index"] for delta in deltas}) == (ARGUMENTS, {0})
    assert opening["delta"]["tool_calls"][0]["function"]["name"] == "weather"
    assert shape.stop_word == "tool_calls"

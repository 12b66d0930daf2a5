"""/v1/responses before a scripted scheduler: what OpenAI's types say of its answers, whole and streamed."""

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from protos.v1 import common_pb2
from router.http import response_answer
from router.http.responses import LOGPROBS
from router.tool_calls import ToolCallForm
from tests.rig import tiny_model
from tests.rig.scripted_scheduler import ScriptedScheduler
from tests.router.http import asking
from tests.router.http.test_app import ERROR, STOP, HttpRig, Serve, many_logprobs, serve
from tests.router.http.test_shapes import ARGUMENTS, TWO_CALLS, in_tags, tokenizer, written
from tests.router.stack import letters

__all__ = ["serve", "tokenizer"]  # the fixtures
PATH = "/v1/responses"
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
TOOLS = [
    {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": True}
    for name in ("weather", "time")
]
BEGUN = ["response.created", "response.in_progress"]
MESSAGE_BEGUN = ["response.output_item.added", "response.content_part.added"]
MESSAGE_DONE = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
CALL_DONE = ["response.function_call_arguments.done", "response.output_item.done"]
CALL = ["response.output_item.added", "response.function_call_arguments.delta", *CALL_DONE]


def events(body: str) -> list[dict[str, Any]]:
    """The values of a stream: each is named by its type, numbered, and as OpenAI's types have it."""
    *pieces, nothing = body.split("\n\n")
    assert nothing == ""
    told = []
    for number, piece in enumerate(pieces):
        kind, data = piece.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {value['type']}"
        assert value["sequence_number"] == number
        EVENT.validate_json(data.removeprefix("data: "), strict=True)
        told.append(value)
    return told


def kinds(told: list[dict[str, Any]]) -> list[str]:
    """Types in their order; deltas that follow each other are one."""
    names = [event["type"] for event in told]
    return [name for i, name in enumerate(names) if not (name.endswith("delta") and name == names[i - 1])]


async def whole(rig: HttpRig, **asked: Any) -> dict[str, Any]:
    response = await rig.post(PATH, **asked)
    assert response.status_code == 200, response.text
    asking.validator("#/components/schemas/Response").validate(response.json())
    Response.model_validate_json(response.text, strict=True)
    told: dict[str, Any] = response.json()
    return told


async def streamed(rig: HttpRig, **asked: Any) -> list[dict[str, Any]]:
    response = await rig.post(PATH, **asked, stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    asking.check_events(PATH, response.text)
    return events(response.text)


def alike(value: Any) -> Any:
    """Without what differs from one answer to the next."""
    match value:
        case dict():
            return {
                name: "" if name in {"id", "call_id", "created_at", "completed_at"} else alike(inner)
                for name, inner in value.items()
            }
        case list():
            return list(map(alike, value))
    return value


def able(script: Any = None, **options: Any) -> ScriptedScheduler:
    scheduler = ScriptedScheduler(script=script, **options)
    assert scheduler.welcome is not None
    scheduler.welcome.features.extend(["constraints", "penalties"])
    return scheduler


# --- messages ---------------------------------------------------------------------------------------


async def test_the_whole_answer(serve: Serve) -> None:
    async with serve(able(letters("ok"))) as rig:
        told = await whole(
            rig,
            input="Hi",
            instructions="Be brief.",
            request_id="mine",
            metadata={"a": "b"},
            temperature=0.5,
            presence_penalty=0.25,
            max_output_tokens=9,
            store=True,
        )
        (message,) = told["output"]
        assert told["completed_at"] >= told["created_at"] > 0
        assert message["id"].startswith("msg_")
        assert alike(told) == {
            "id": "",
            "object": "response",
            "created_at": "",
            "completed_at": "",
            "status": "completed",
            "error": None,
            "incomplete_details": None,
            "model": "tiny",
            "output": [
                {
                    "id": "",
                    "type": "message",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "ok", "annotations": [], "logprobs": []}],
                }
            ],
            "usage": {
                "input_tokens": len(rig.scheduler.submits[0].prompt_token_ids),
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": 3,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": len(rig.scheduler.submits[0].prompt_token_ids) + 3,
            },
            "instructions": "Be brief.",
            "max_output_tokens": 9,
            "metadata": {"a": "b"},
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "temperature": 0.5,
            "top_p": 1.0,
            "presence_penalty": 0.25,
            "frequency_penalty": 0.0,
            "top_logprobs": 0,
            "user": None,
            "safety_identifier": None,
            "prompt_cache_key": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "background": False,
            "conversation": None,
            "max_tool_calls": None,
            "previous_response_id": None,
            "prompt": None,
            "truncation": "disabled",
        }
        assert told["id"] == "resp_mine"
        prompt = bytes(t for t in rig.scheduler.submits[0].prompt_token_ids if t < 256).decode()
        assert prompt == "nullsystem\nBe brief.\nuser\nHi\nassistant\n"
        await rig.router.quiet()


@pytest.mark.parametrize("tokens_a_step", [1, 3, 50])
async def test_a_stream_tells_what_the_whole_answer_tells(serve: Serve, tokens_a_step: int) -> None:
    async with serve(able(letters("Grüße, 😀"), tokens_a_step=tokens_a_step)) as rig:
        told = await streamed(rig, input="Hi")
        assert kinds(told) == [
            *BEGUN, *MESSAGE_BEGUN, "response.output_text.delta", *MESSAGE_DONE, "response.completed",
        ]  # fmt: skip
        created, progressed, added, part = told[:4]
        assert created["response"] == progressed["response"]
        assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
        assert created["response"]["usage"] is None
        assert (added["item"]["status"], added["item"]["content"]) == ("in_progress", [])
        assert part["part"]["text"] == ""
        text_done, part_done, item_done, last = told[-4:]
        text = "".join(event["delta"] for event in told if event["type"].endswith("delta"))
        assert text == text_done["text"] == part_done["part"]["text"] == "Grüße, 😀"
        assert item_done["item"]["content"] == [part_done["part"]]
        assert last["response"]["output"] == [item_done["item"]]
        ids = {event.get("item_id", added["item"]["id"]) for event in told}
        assert ids == {item_done["item"]["id"]}
        assert alike(last["response"]) == alike(await whole(rig, input="Hi"))


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_cut_short_is_incomplete(serve: Serve, stream: bool) -> None:
    async with serve(able(letters("abcdef"))) as rig:
        if stream:
            last = (await streamed(rig, input="Hi", max_output_tokens=3))[-1]
            assert last["type"] == "response.incomplete"
            told = last["response"]
        else:
            told = await whole(rig, input="Hi", max_output_tokens=3)
        assert (told["status"], told["completed_at"]) == ("incomplete", None)
        assert told["incomplete_details"] == {"reason": "max_output_tokens"}
        (message,) = told["output"]
        assert (message["status"], message["content"][0]["text"]) == ("incomplete", "abc")


async def test_an_answer_of_nothing_is_an_empty_message(serve: Serve) -> None:
    async with serve(able(letters(""))) as rig:
        told = await streamed(rig, input="Hi")
        assert kinds(told) == [*BEGUN, *MESSAGE_BEGUN, *MESSAGE_DONE, "response.completed"]
        (message,) = (await whole(rig, input="Hi"))["output"]
        assert message["content"][0]["text"] == ""


@pytest.mark.parametrize("count", [3, 400])
async def test_logprobs_have_an_entry_for_each_token_in_deltas_and_at_the_end(
    serve: Serve, count: int
) -> None:
    ids, rows = many_logprobs(count)
    asked = {"input": "Hi", "include": [LOGPROBS], "top_logprobs": 4}

    async def answered(rig: HttpRig, number: int, ask: Any) -> Any:
        call = asyncio.create_task(ask(rig, **asked))
        submit = await rig.scheduler.submitted(number)
        assert submit.sampling.logprobs == 4
        await rig.scheduler.give(submit, ids[:2], logprobs=rows[:2])
        await rig.scheduler.give(submit, ids[2:], logprobs=rows[2:], finish=STOP)
        return await call

    async with serve(able()) as rig:
        (message,) = (await answered(rig, 1, whole))["output"]
        logprobs = message["content"][0]["logprobs"]
        assert len(logprobs) == count
        assert [entry["token"] for entry in logprobs[:2]] == ["a", "b"]
        assert all(len(entry["top_logprobs"]) == 4 for entry in logprobs)
        told = await answered(rig, 2, streamed)
        deltas = [event for event in told if event["type"] == "response.output_text.delta"]
        assert [entry for event in deltas for entry in event["logprobs"]] == logprobs
        text_done, part_done, _, last = told[-4:]
        assert text_done["logprobs"] == part_done["part"]["logprobs"] == logprobs
        assert last["response"]["output"][0]["content"][0]["logprobs"] == logprobs
        await rig.router.quiet()


async def test_a_stream_of_more_logprobs_than_are_kept_for_its_end_fails(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_answer, "MAX_KEPT_NUMBERS", 30)
    ids, rows = many_logprobs(12)
    async with serve(able()) as rig:
        asked = {"input": "Hi", "include": [LOGPROBS], "top_logprobs": 4, "stream": True}
        call = asyncio.create_task(rig.post(PATH, **asked))
        submit = await rig.scheduler.submitted()
        await rig.scheduler.give(submit, ids[:3], logprobs=rows[:3])
        await rig.scheduler.until(lambda: 1 in rig.scheduler.acks)
        await rig.scheduler.give(submit, ids[3:9], logprobs=rows[3:9])
        last = events((await call).text)[-1]
        assert last["type"] == "response.failed"
        assert "top_logprobs asks for more than the 30 numbers" in last["response"]["error"]["message"]
        await rig.router.quiet()


async def test_a_stop_string_and_a_form_of_our_own_are_served_too(serve: Serve) -> None:
    async with serve(able(letters("ab! more"))) as rig:
        told = await whole(rig, input="Hi", stop=["!"], regex="ab.*", seed=1)
        assert (told["status"], told["output"][0]["content"][0]["text"]) == ("completed", "ab")
        assert rig.scheduler.submits[0].sampling.regex == "ab.*"


# --- calls ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"type": "function", "name": "weather"}, ARGUMENTS),
        ("required", f'{{"name": "weather", "arguments": {ARGUMENTS}}}'),
    ],
)
async def test_a_forced_function_is_an_item_whole_and_streamed(
    serve: Serve, choice: object, said: str
) -> None:
    async with serve(able(letters(said))) as rig:
        asked = {"input": "Hi", "tools": TOOLS, "tool_choice": choice}
        told = await whole(rig, **asked)
        (call,) = told["output"]
        assert call["id"].startswith("fc_")
        assert call["call_id"].startswith("call_")
        assert alike(call) == {
            "id": "", "call_id": "", "type": "function_call", "name": "weather", "arguments": ARGUMENTS,
            "status": "completed",
        }  # fmt: skip
        assert (told["tool_choice"], told["tools"][0]["name"]) == (choice, "weather")
        stream = await streamed(rig, **asked)
        assert kinds(stream) == [*BEGUN, *CALL, "response.completed"]
        deltas = [event["delta"] for event in stream if event["type"].endswith("delta")]
        assert "".join(deltas) == ARGUMENTS
        assert (len(deltas) > 1) is (choice != "required")
        assert alike(stream[-1]["response"]) == alike(told)


async def test_arguments_that_are_cut_short_are_as_far_as_they_go(serve: Serve) -> None:
    async with serve(able(letters(ARGUMENTS))) as rig:
        told = await whole(
            rig,
            input="Hi",
            tools=TOOLS[:1],
            tool_choice={"type": "function", "name": "weather"},
            max_output_tokens=5,
        )
        (call,) = told["output"]
        assert (told["status"], call["status"], call["arguments"]) == (
            "incomplete",
            "incomplete",
            ARGUMENTS[:5],
        )


@pytest.mark.parametrize("form", ToolCallForm)
async def test_calls_that_a_model_writes_are_items_behind_what_it_says(
    serve: Serve, form: ToolCallForm
) -> None:
    ids = [*in_tags(written(form, "Let me look.", TWO_CALLS)), tiny_model.EOS_ID]
    async with serve(able(lambda _: ids), tool_call_form=form) as rig:
        told = await whole(rig, input="Hi", tools=TOOLS)
        message, *calls = told["output"]
        assert (message["content"][0]["text"], message["status"]) == ("Let me look.", "completed")
        assert [(call["name"], call["arguments"]) for call in calls] == TWO_CALLS
        assert len({call["call_id"] for call in calls}) == len({call["id"] for call in calls}) == 2
        stream = await streamed(rig, input="Hi", tools=TOOLS)
        assert kinds(stream) == [
            *BEGUN, *MESSAGE_BEGUN, "response.output_text.delta", *MESSAGE_DONE, *CALL, *CALL,
            "response.completed",
        ]  # fmt: skip
        of_items = [event["output_index"] for event in stream if "output_index" in event]
        assert of_items == sorted(of_items)
        assert set(of_items) == {0, 1, 2}
        assert alike(stream[-1]["response"]) == alike(told)
        (one,) = [
            item
            for item in (await whole(rig, input="Hi", tools=TOOLS, parallel_tool_calls=False))["output"]
            if item["type"] == "function_call"
        ]
        assert one["name"] == TWO_CALLS[0][0]


async def test_openais_client_has_its_calls_answered(serve: Serve) -> None:
    """What an answer says goes back as it came, and its form is what the client parses."""
    form = ToolCallForm.HERMES
    said = written(form, "Let me look.", TWO_CALLS[:1])
    prompts: list[str] = []

    def script(submit: Any) -> list[int]:
        prompts.append(bytes(t for t in submit.prompt_token_ids if t < 256).decode())
        answer = '{"mild": true}' if "tool\n" in prompts[-1] else said
        return [*in_tags(answer), tiny_model.EOS_ID]

    class Weather(BaseModel):
        mild: bool

    async with serve(able(script), tool_call_form=form) as rig:
        client = openai.AsyncOpenAI(
            api_key="none", base_url="http://localhost/v1", http_client=rig.client, max_retries=0
        )
        given: list[Any] = [{"role": "user", "content": "Mild?"}]
        tools: Any = TOOLS
        async with client.responses.stream(model="tiny", input=given, tools=tools) as stream:
            answer = await stream.get_final_response()
        (call,) = [item for item in answer.output if item.type == "function_call"]
        assert (call.name, call.arguments) == TWO_CALLS[0]
        given += answer.output
        given.append({"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees"})
        parsed = await client.responses.parse(model="tiny", input=given, tools=tools, text_format=Weather)
        assert parsed.output_parsed == Weather(mild=True)
        assert prompts[1].endswith("user\nMild?\nassistant\nLet me look.\ntool\n20 degrees\nassistant\n")
        either = rig.scheduler.submits[1].sampling.json_or_tagged
        assert json.loads(either.json_schema)["properties"].keys() == {"mild"}
        assert [tag.begin for tag in either.tags] == ["<tool_call>\n"] * 2

        # The same from its first turn on, as agents ask.
        given = [{"role": "user", "content": "Mild?"}]
        said = said[said.index("<") :]
        first = await client.responses.parse(model="tiny", input=given, tools=tools, text_format=Weather)
        (item,) = first.output
        assert item.type == "function_call"
        assert (item.name, item.arguments) == TWO_CALLS[0]
        assert first.output_parsed is None


# --- failures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "word"), [(13, "server_error"), (8, "rate_limit_exceeded")])
async def test_a_failure_behind_the_first_token_is_the_last_event(serve: Serve, code: int, word: str) -> None:
    async with serve(able()) as rig:
        call = asyncio.create_task(rig.post(PATH, input="Hi", stream=True))
        submit = await rig.scheduler.submitted()
        await rig.scheduler.give(submit, list(b"abc"))
        await rig.scheduler.until(lambda: 1 in rig.scheduler.acks)
        await rig.scheduler.give(submit, [], finish=ERROR, message="the logits are NaN", status_code=code)
        told = events((await call).text)
        failed = told[-1]["response"]
        assert told[-1]["type"] == "response.failed"
        assert (failed["status"], failed["usage"]) == ("failed", None)
        assert failed["error"] == {"code": word, "message": "the logits are NaN"}
        (message,) = failed["output"]
        assert (message["status"], message["content"][0]["text"]) == ("incomplete", "abc")
        await rig.router.quiet()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_gives_its_response_up(serve: Serve, stream: bool) -> None:
    async with serve(able()) as rig:
        call = asyncio.create_task(rig.post(PATH, input="Hi", stream=stream))
        await rig.scheduler.give(await rig.scheduler.submitted(), [97])
        call.cancel()
        await rig.scheduler.until(lambda: len(rig.scheduler.cancels) == 1)
        assert rig.scheduler.cancels[0].reason == common_pb2.FINISH_REASON_ABORT
        await rig.router.quiet()


async def test_errors_go_by_the_names_of_the_body(serve: Serve) -> None:
    wrong: list[tuple[dict[str, Any], int, str]] = [
        ({"temperature": -1}, 400, "temperature"),
        ({"model": "other"}, 404, "model"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"max_output_tokens": 5000}, 400, "max_output_tokens"),
        ({"include": [LOGPROBS], "top_logprobs": 21}, 400, "top_logprobs"),
        ({"input": "x" * 600}, 400, "input"),
        ({"tools": [TOOLS[0] | {"description": "x" * 524_288}]}, 400, "tools"),
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": 5}}}}, 400,
         "text.format.schema"),
        ({"unheard_of": 1}, 400, "unheard_of"),
    ]  # fmt: skip
    async with serve(able()) as rig:
        for fields, status, param in wrong:
            got, error = await rig.error(PATH, **({"input": "Hi"} | fields), stream=True)
            assert (got, error["param"]) == (status, param), fields
        assert not rig.scheduler.submits
        await rig.router.quiet()


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/resp_1"), ("DELETE", "/resp_1"), ("POST", "/resp_1/cancel"), ("GET", "/resp_1/input_items")],
)
async def test_that_no_response_is_stored_is_said_where_one_is_looked_for(
    serve: Serve, method: str, path: str
) -> None:
    async with serve() as rig:
        response = await rig.client.request(method, PATH + path)
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "not_found")
        assert "no response is stored" in error["message"]

import contextlib
import itertools
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from protos.v1 import router_pb2
from router import model_files
from router.http.shapes import CallShape, CompletionShape
from router.latencies import Latencies
from router.request_log import ChoiceLog, Delta, RequestLog, SamplingParams, TokenLogprobs
from router.stop_strings import StopStrings
from router.text_stream import TextStream
from router.tokenizer import Tokenizer
from router.tool_calls import TAGS, ToolCallForm
from tests.rig import tiny_model
from tests.rig.scripted_scheduler import ScriptedScheduler
from tests.router.http.test_app import HI, HttpRig, Serve, events, serve
from tests.router.http.test_schemas import is_valid
from tests.router.stack import letters

__all__ = ["serve"]  # the fixture
TAG_IDS = {tag: 260 + i for i, tag in enumerate(itertools.chain(*TAGS.values()))}
ARGUMENTS = '{"city": "Zürich"}'
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """The tiny model's, with a template that knows tools and every form's tags as special tokens."""
    folder = tiny_model.build(tmp_path / "model")
    written = json.loads((folder / "tokenizer.json").read_text())
    written["added_tokens"] += [
        written["added_tokens"][0] | {"id": token_id, "content": tag} for tag, token_id in TAG_IDS.items()
    ]
    written["model"]["vocab"] |= TAG_IDS
    (folder / "tokenizer.json").write_text(json.dumps(written))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{{ tools | tojson }}{{ 'no thinking' if enable_thinking is false }}" + tiny_model.CHAT_TEMPLATE
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(model_files.read(folder))


def of(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5, 1, (), ())


def a_log(tokenizer: Tokenizer, prompt_token_ids: tuple[int, ...] = (97,)) -> RequestLog:
    log = RequestLog(
        request_id="r",
        tenant="",
        prompt_token_ids=prompt_token_ids,
        sampling=SamplingParams(0, 1, 0, 0, 0, 9, 0, ignore_eos=False, stop_token_ids=(), logprobs=None),
        texts=[TextStream(tokenizer.detokenizer(), StopStrings((), include=False))],
        eos_token_ids=frozenset(),
        priority=0,
        cache_salt="",
        body_digest=b"",
        deadline=None,
        received_at=0,
        latencies=Latencies(),
    )
    log.take_prompt_logprobs(1, list(map(of, prompt_token_ids[1:])))
    return log


def a_choice(tokenizer: Tokenizer) -> ChoiceLog:
    (choice,) = a_log(tokenizer).choices
    return choice


# --- echoes -----------------------------------------------------------------------------------------


def adding_a_start(folder: Path) -> Tokenizer:
    """The tiny model's, which puts a start token before a text."""
    tiny_model.build(folder)
    written = json.loads((folder / "tokenizer.json").read_text())
    start = {"SpecialToken": {"id": "<|bos|>", "type_id": 0}}
    written["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [start, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [tiny_model.BOS_ID], "tokens": ["<|bos|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(written))
    return Tokenizer(model_files.read(folder))


@pytest.mark.parametrize(
    ("echo", "offsets"),
    [
        ("Hi", [0, 0, 1]),
        ("<|im_start|>é<|im_end|>!", [0, 0, 12, 12, 13, 23]),
        ("<|bos|>Hi", [0, 0, 7, 8]),
        ("<|bos|><|bos|>", [0, 0, 7]),
        ("a<|bos|>b", [0, 0, 1, 8]),
    ],
)
def test_b71_tokens_of_an_echo_stand_where_its_text_has_them(
    tmp_path: Path, echo: str, offsets: list[int]
) -> None:
    tokenizer = adding_a_start(tmp_path / "starting")
    log = a_log(tokenizer, tuple(tokenizer.encode(echo)))
    shape = CompletionShape(tokenizer, ["another", echo])
    told = shape.echo_logprobs(1, log, 0)
    assert told is not None
    assert told["text_offset"] == offsets
    answered = shape.logprobs(log.choices[0], Delta(0, 0, "ab", (97, 98), (of(97), of(98))))
    assert answered["text_offset"] == [len(echo), len(echo) + 1]


def test_b71_special_tokens_among_ids_have_no_place_in_their_echo(tokenizer: Tokenizer) -> None:
    log = a_log(tokenizer, (tiny_model.IM_START_ID, 97, tiny_model.EOS_ID, 98))
    told = CompletionShape(tokenizer, ["ab"]).echo_logprobs(0, log, 0)
    assert told is not None
    assert told["text_offset"] == [0, 0, 1, 1]


# --- calls ------------------------------------------------------------------------------------------


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
    shape = CallShape(tokenizer, function="weather", call_id=lambda: "call_1", stop_word="tool_calls")
    choice = a_choice(tokenizer)
    message = shape.whole(0, choice, ARGUMENTS)["message"]
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert call == {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": ARGUMENTS},
    }
    opening = shape.opening(0)
    assert opening is not None
    pieces = [shape.piece(choice, ARGUMENTS[:5]), shape.piece(choice, ARGUMENTS[5:])]
    deltas = [opening["delta"], *(piece["delta"] for piece in pieces if piece)]
    joined = "".join(delta["tool_calls"][0]["function"]["arguments"] for delta in deltas)
    assert (joined, {delta["tool_calls"][0]["index"] for delta in deltas}) == (ARGUMENTS, {0})
    assert opening["delta"]["tool_calls"][0]["function"]["name"] == "weather"
    assert shape.stop_word(choice) == "tool_calls"


# --- calls in text ----------------------------------------------------------------------------------

TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
WRITTEN = {
    ToolCallForm.HERMES: '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>',
    ToolCallForm.LLAMA3_JSON: '{{"name": "{}", "parameters": {}}}',
    ToolCallForm.MISTRAL: '[TOOL_CALLS] [{{"name": "{}", "arguments": {}}}]',
}
TWO_CALLS = [("weather", ARGUMENTS), ("time", "{}")]
ANSWERS = {
    "two calls": ("", TWO_CALLS),
    "content and a call": ("Let me look.", TWO_CALLS[:1]),
    "no call": ("Is 1 < 2? {} <tool_call>", []),
}
Form = pytest.mark.parametrize("form", ToolCallForm)


def written(form: ToolCallForm, content: str, calls: list[tuple[str, str]]) -> str:
    return "\n".join([content, *(WRITTEN[form].format(*call) for call in calls)] if calls else [content])


@dataclass
class Said:
    """What a client of OpenAI's has understood."""

    content: str | None
    calls: list[tuple[str, str]]
    ids: list[str]
    finish_reason: str | None


async def whole(client: openai.AsyncOpenAI, **asked: Any) -> list[Said]:
    answer = await client.chat.completions.create(model="tiny", messages=HI, **asked)
    said = []
    for choice in answer.choices:
        calls = [call for call in choice.message.tool_calls or [] if call.type == "function"]
        told = [(call.function.name, call.function.arguments) for call in calls]
        said.append(Said(choice.message.content, told, [call.id for call in calls], choice.finish_reason))
    return said


async def streamed(client: openai.AsyncOpenAI, **asked: Any) -> list[Said]:
    """By the index of choices, and of calls."""
    stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True, **asked)
    said = [Said(None, [], [], None) for _ in range(asked.get("n", 1))]
    async for chunk in stream:
        for choice in chunk.choices:
            mine = said[choice.index]
            assert mine.finish_reason is None
            mine.finish_reason = choice.finish_reason
            if choice.delta.content is not None:
                mine.content = (mine.content or "") + choice.delta.content
            for call in choice.delta.tool_calls or []:
                assert (call.index, call.type) == (len(mine.calls), "function")
                assert call.function is not None
                mine.calls.append((call.function.name or "", call.function.arguments or ""))
                mine.ids.append(call.id or "")
    return said


@contextlib.asynccontextmanager
async def asking(rig: HttpRig) -> AsyncIterator[openai.AsyncOpenAI]:
    yield openai.AsyncOpenAI(
        api_key="none", base_url="http://localhost/v1", http_client=rig.client, max_retries=0
    )


@Form
@pytest.mark.parametrize(("content", "calls"), ANSWERS.values(), ids=ANSWERS.keys())
@pytest.mark.parametrize("ask", [whole, streamed])
async def test_openais_client_gets_the_calls_that_a_model_writes(
    serve: Serve, form: ToolCallForm, content: str, calls: list[tuple[str, str]], ask: Any
) -> None:
    scheduler = ScriptedScheduler(script=letters(written(form, content, calls)))
    async with serve(scheduler, tool_call_form=form) as rig, asking(rig) as client:
        for choice in ({}, {"tool_choice": "auto"}):
            said = await ask(client, tools=[WEATHER, TIME], n=2, **choice)
            for one in said:
                assert (one.content or None, one.calls) == (content or None, calls)
                assert one.finish_reason == ("tool_calls" if calls else "stop")
            if calls:
                assert {one.content for one in said} == {content or None}
            ids = [call_id for one in said for call_id in one.ids]
            assert len(set(ids)) == len(ids) == 2 * len(calls)
            of_mistral = form is ToolCallForm.MISTRAL  # its templates refuse any other
            wanted = re.compile("[0-9a-zA-Z]{9}" if of_mistral else "call_.+")
            assert all(wanted.fullmatch(call_id) for call_id in ids)


@Form
@pytest.mark.parametrize("ask", [whole, streamed])
async def test_calls_are_found_where_tags_are_special_tokens(
    serve: Serve, form: ToolCallForm, ask: Any
) -> None:
    ids = in_tags(written(form, "Let me look.", TWO_CALLS))
    async with (
        serve(ScriptedScheduler(script=lambda _: ids), tool_call_form=form) as rig,
        asking(rig) as client,
    ):
        (said,) = await ask(client, tools=[WEATHER, TIME])
        assert (said.content, said.calls) == ("Let me look.", TWO_CALLS)
        (said,) = await ask(client)
        assert not any(tag in said.content for tag in TAG_IDS)


async def test_mistrals_later_form_is_found_too(serve: Serve) -> None:
    form = ToolCallForm.MISTRAL
    ids = in_tags("".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in TWO_CALLS))
    async with (
        serve(ScriptedScheduler(script=lambda _: ids), tool_call_form=form) as rig,
        asking(rig) as client,
    ):
        for ask in (whole, streamed):
            (said,) = await ask(client, tools=[WEATHER, TIME])
            assert (said.content, said.calls) == (None, TWO_CALLS)


async def test_a_grpc_client_with_tools_is_shown_the_tags(serve: Serve) -> None:
    text = written(ToolCallForm.MISTRAL, "", TWO_CALLS)
    scheduler = ScriptedScheduler(script=lambda _: in_tags(text))
    async with serve(scheduler, tool_call_form=ToolCallForm.MISTRAL) as rig:
        chat = router_pb2.Chat(messages=[router_pb2.Message(role="user", content="Hi")])
        for tools, shown in (([], False), ([json.dumps(TIME)], True)):
            chat.tools[:] = tools
            answer = await rig.router.stub.Complete(router_pb2.GenerateRequest(chat=chat))
            (choice,) = answer.choices
            assert ("[TOOL_CALLS]" in choice.text) is shown


def in_tags(text: str) -> list[int]:
    """Its ids: a byte each, but for tags."""
    pieces = re.split("(" + "|".join(map(re.escape, TAG_IDS)) + ")", text)
    return [
        token_id
        for piece in pieces
        for token_id in ([TAG_IDS[piece]] if piece in TAG_IDS else piece.encode())
    ]


async def test_openais_own_gathering_of_a_stream_is_the_whole_answer(serve: Serve) -> None:
    form = ToolCallForm.HERMES
    scheduler = ScriptedScheduler(script=letters(written(form, "Let me look.", TWO_CALLS)))
    async with serve(scheduler, tool_call_form=form) as rig, asking(rig) as client:
        tools: Any = [WEATHER, TIME]
        async with client.chat.completions.stream(model="tiny", messages=HI, tools=tools) as stream:
            (choice,) = (await stream.get_final_completion()).choices
        assert (choice.message.content, choice.finish_reason) == ("Let me look.", "tool_calls")
        calls = choice.message.tool_calls or []
        assert [(call.function.name, call.function.arguments) for call in calls] == TWO_CALLS


@pytest.mark.parametrize("ask", [whole, streamed])
async def test_text_stays_text_where_no_form_is_known_or_no_tool_is_to_be_called(
    serve: Serve, ask: Any
) -> None:
    text = written(ToolCallForm.HERMES, "", TWO_CALLS)
    scheduler = ScriptedScheduler(script=letters(text))
    async with serve(scheduler) as rig, asking(rig) as client:
        (said,) = await ask(client, tools=[WEATHER, TIME])
        assert said == Said(text, [], [], "stop")
    async with (
        serve(ScriptedScheduler(script=letters(text)), tool_call_form=ToolCallForm.HERMES) as rig,
        asking(rig) as client,
    ):
        for options in ({}, {"tools": [WEATHER, TIME], "tool_choice": "none"}):
            (said,) = await ask(client, **options)
            assert said == Said(text, [], [], "stop")
        (said,) = await ask(client, tools=[WEATHER, TIME], parallel_tool_calls=False)
        assert (said.content, said.calls) == (text[text.rindex("\n<tool_call>") :], TWO_CALLS[:1])


async def test_the_forced_call_of_each_choice_has_a_name_of_its_own(serve: Serve) -> None:
    scheduler = ScriptedScheduler(script=letters(ARGUMENTS))
    assert scheduler.welcome is not None
    scheduler.welcome.features.append("constraints")
    async with serve(scheduler) as rig:
        asked = {"messages": HI, "tools": [WEATHER], "tool_choice": "required", "n": 3}
        whole_answer = await rig.post("/v1/chat/completions", **asked)
        chunks = events((await rig.post("/v1/chat/completions", **asked, stream=True)).text)
        for told, answers in (("message", [whole_answer.json()]), ("delta", chunks)):
            choices = [choice for answer in answers for choice in answer["choices"]]
            calls = [call for choice in choices for call in choice[told].get("tool_calls", [])]
            ids = [call["id"] for call in calls if "id" in call]
            assert len(set(ids)) == len(ids) == 3


@pytest.mark.parametrize("ask", [whole, streamed])
async def test_an_answer_without_a_word_has_empty_content_and_can_be_sent_back(
    serve: Serve, ask: Any
) -> None:
    scheduler = ScriptedScheduler(script=letters(""))
    async with serve(scheduler, tool_call_form=ToolCallForm.HERMES) as rig, asking(rig) as client:
        (said,) = await ask(client, tools=[WEATHER])
        assert said == Said("", [], [], "stop")
        messages = [*HI, {"role": "assistant", "content": said.content}, *HI]
        assert (await rig.post("/v1/chat/completions", messages=messages)).status_code == 200


@pytest.mark.parametrize("ask", [whole, streamed])
async def test_a_call_that_was_cut_short_is_content_and_its_end_is_the_length(serve: Serve, ask: Any) -> None:
    text = written(ToolCallForm.HERMES, "So.", TWO_CALLS)
    cut = text.rindex("</tool_call>") - 5
    scheduler = ScriptedScheduler(script=lambda _: list(text.encode()))
    async with serve(scheduler, tool_call_form=ToolCallForm.HERMES) as rig, asking(rig) as client:
        (said,) = await ask(client, tools=[WEATHER, TIME], max_tokens=len(text[:cut].encode()))
        assert said.calls == TWO_CALLS[:1]
        assert said.content == "So." + text[text.rindex("\n<tool_call>") : cut]
        assert said.finish_reason == "length"


@pytest.mark.parametrize("ask", [whole, streamed])
async def test_required_of_several_tools_is_one_call_whatever_the_models_form(serve: Serve, ask: Any) -> None:
    scheduler = ScriptedScheduler(script=letters('{"name": "time", "arguments": {}}'))
    assert scheduler.welcome is not None
    scheduler.welcome.features.append("constraints")
    place = {"type": "object", "properties": {"near": {"$ref": "#/$defs/place"}}}
    refers = {"$defs": {"place": place}, "$ref": "#/$defs/place"}
    find = {"type": "function", "function": {"name": "find", "parameters": refers}}
    async with serve(scheduler) as rig, asking(rig) as client:
        (said,) = await ask(client, tools=[WEATHER, TIME, find], tool_choice="required")
        assert (said.content, said.calls, said.finish_reason) == (None, [("time", "{}")], "tool_calls")
        schema = json.loads(rig.scheduler.submits[-1].sampling.json_schema)
        names = [one["properties"]["name"]["const"] for one in schema["anyOf"]]
        assert names == ["weather", "time", "find"]


async def test_what_is_held_back_hides_neither_logprobs_nor_ids(serve: Serve) -> None:
    text = written(ToolCallForm.HERMES, "", TWO_CALLS[:1])
    async with serve(ScriptedScheduler(script=letters(text)), tool_call_form=ToolCallForm.HERMES) as rig:
        asked = {"messages": HI, "tools": [WEATHER], "stream": True}
        plain = events((await rig.post("/v1/chat/completions", **asked)).text)
        assert len(plain) == 3  # the opening, the call, the end
        chunks = events((await rig.post("/v1/chat/completions", return_token_ids=True, **asked)).text)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        ids = [token_id for choice in choices for token_id in choice.get("token_ids", [])]
        assert ids == [*text.encode(), tiny_model.EOS_ID]
        assert all(is_valid("ChatChunkChoice", choice) for choice in choices)


async def test_the_template_sees_variables_at_both_doors_and_in_tokenize(
    serve: Serve,
) -> None:
    kwargs = {"enable_thinking": False}
    async with serve(ScriptedScheduler(script=letters("ok"))) as rig:
        counts = set()
        for asked in ({"messages": HI}, {"messages": HI, "chat_template_kwargs": kwargs}):
            ids = (await rig.post("/tokenize", **asked)).json()["tokens"]
            await rig.post("/v1/chat/completions", **asked)
            assert list(rig.scheduler.submits[-1].prompt_token_ids) == ids
            counts.add(len(ids))
        chat = router_pb2.Chat(messages=[router_pb2.Message(role="user", content="Hi")])
        chat.chat_template_kwargs = json.dumps(kwargs)
        await rig.router.stub.Complete(router_pb2.GenerateRequest(chat=chat))
        assert list(rig.scheduler.submits[-1].prompt_token_ids) == ids
        assert len(counts) == 2
        status, error = await rig.error(
            "/v1/chat/completions", messages=HI, chat_template_kwargs={"tools": []}
        )
        assert (status, error["param"]) == (400, "chat_template_kwargs")
        assert "'tools'" in error["message"]

"""Cases of text, ends, refusals: the same at gRPC and HTTP, whole and streamed, before a scripted scheduler.

Cases of sampling, for which a model must run, are in `tests/integration/test_cases_at_every_door.py`. Not at
every door, since only JSON can say it: B77 and B98 (null), B104 (lone surrogates), NaN of B55 as text; since
only a stream can do it: B47, B70, B76, B88. Those have tests of their own.
"""

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from protos.v1 import common_pb2, scheduler_pb2
from router.tokenizer import Tokenizer
from tests.rig import tiny_model
from tests.rig.client import Client
from tests.rig.doors import DOORS, Answered, FourDoors, Refused
from tests.rig.scripted_scheduler import ScriptedScheduler
from tests.router.http.test_app import HttpRig, Serve, serve
from tests.router.stack import letters

__all__ = ["serve"]  # the fixture
EMOJI, FAMILY = "a😀b", "👨‍👩‍👧‍👦 한국어 العربية"
ANY_DOOR = pytest.mark.parametrize("door", DOORS)


@contextlib.asynccontextmanager
async def doors(serve: Serve, scheduler: ScriptedScheduler) -> AsyncIterator[tuple[FourDoors, HttpRig]]:
    assert scheduler.welcome is not None
    scheduler.welcome.features.extend(
        ["constraints", "penalties", "logit_bias", "token_lists", "prompt_logprobs"]
    )
    async with serve(scheduler) as rig:
        yield FourDoors(Client(rig.router.stub), rig.client), rig
        await rig.router.quiet()


# Case, what is asked, what the model says, what of it is told, why it ends, the stop that ended it.
TEXTS: list[tuple[str, dict[str, Any], str | bytes, str, str, str | None]] = [
    ("b41", {"stop": ["DEFGHIJ"]}, " ABCDEFGHIJK", " ABC", "stop", "DEFGHIJ"),
    ("b41_no_stop", {"stop": ["DEFGHIJ"]}, " ABCDEFGHIX", " ABCDEFGHIX", "stop", None),
    ("b42", {"stop": ["\n"]}, "Answer\n\n", "Answer", "stop", "\n"),
    ("b43", {"stop": ["cd", "b"]}, "abcd", "a", "stop", "b"),
    ("b43_other_order", {"stop": ["b", "cd"]}, "abcd", "a", "stop", "b"),
    ("b44", {"stop": "stop"}, "go stop! more", "go ", "stop", "stop"),
    ("b45", {"stop": ["b,c"]}, "ab,c,d", "a", "stop", "b,c"),
    ("b45_included", {"stop": ["b,c"], "include_stop": True}, "ab,c,d", "ab,c", "stop", "b,c"),
    ("b46", {"stop": []}, "all of it", "all of it", "stop", None),
    ("b47", {"stop": ["Q" * 200]}, "x" * 60, "x" * 60, "stop", None),
    ("b48_stop", {"stop": ["de"], "max_tokens": 5}, "abcde", "abc", "stop", "de"),
    ("b48_end_token", {"max_tokens": 5}, "abcd", "abcd", "stop", None),
    ("b48_length", {"max_tokens": 4}, "abcd", "abcd", "length", None),
    ("b49_emoji", {}, EMOJI, EMOJI, "stop", None),
    ("b49_family", {}, FAMILY, FAMILY, "stop", None),
    ("b50_length", {"max_tokens": 3}, EMOJI, "a\ufffd", "length", None),
    ("b50_end", {}, b"a\xf0\x9f", "a\ufffd", "stop", None),
    ("b50_word", {}, b"a\xf0\x9f word", "a\ufffd word", "stop", None),
    ("b51", {}, " Hello world  x", " Hello world  x", "stop", None),
    ("b73_length", {"max_tokens": 3}, "abcdef", "abc", "length", None),
]


@pytest.mark.parametrize("tokens_a_step", [1, 2, 5])
async def test_b41_to_b52_b72_b73_the_same_text_and_end_at_every_door(
    serve: Serve, tokens_a_step: int
) -> None:
    script: list[int] = []
    scheduler = ScriptedScheduler(script=lambda _: script, tokens_a_step=tokens_a_step)
    async with doors(serve, scheduler) as (four, _):
        for case, asked, said, told, reason, matched in TEXTS:
            script = [*(said.encode() if isinstance(said, str) else said), tiny_model.EOS_ID]
            answer = await four.ask_all(prompt="Hi", **asked)
            assert isinstance(answer, Answered), case
            assert (answer.only.text, answer.only.reason, answer.only.matched) == (told, reason, matched), (
                case
            )
            assert answer.num_output_tokens == len(answer.only.token_ids) <= len(script), case
            if matched is not None:  # tokens after the one that completed the stop are not counted
                text = said if isinstance(said, str) else ""
                assert answer.num_output_tokens == len(text[: text.index(matched) + len(matched)].encode()), (
                    case
                )


@pytest.mark.parametrize("tokens_a_step", [1, 4])
async def test_b74_the_last_tokens_come_before_the_end_in_streams_of_every_length(
    serve: Serve, tokens_a_step: int
) -> None:
    chance = random.Random(74)

    def script(submit: scheduler_pb2.Submit) -> list[int]:
        rolled = random.Random(bytes(submit.prompt_token_ids))
        return [*rolled.choices(range(97, 123), k=rolled.randrange(20)), tiny_model.EOS_ID]

    async with doors(serve, ScriptedScheduler(script=script, tokens_a_step=tokens_a_step)) as (four, _):
        for number in range(60):
            stop = chance.choice([[], ["e"], ["ab", "q", "zz"]])
            asked = {"prompt": f"number {number}", "stop": stop}
            answer = await four.ask_all(**asked)
            assert isinstance(answer, Answered)
            said = script(scheduler_pb2.Submit(prompt_token_ids=asked["prompt"].encode()))[:-1]
            whole = bytes(said).decode()
            cut = min((whole.index(one) for one in stop if one in whole), default=len(whole))
            assert answer.only.text == whole[:cut]
            if cut == len(whole):
                assert answer.only.token_ids == [*said, tiny_model.EOS_ID], "the last id is told too"


@pytest.mark.parametrize("chat", [False, True])
async def test_b64_b65_b72_choices_that_end_at_different_times_are_all_told_and_counted(
    serve: Serve, chat: bool
) -> None:
    def script(submit: scheduler_pb2.Submit) -> list[int]:
        length = [2, 5, 9, 99][submit.sample_index]
        return [*(b"abcdefghijkl"[:length]), tiny_model.EOS_ID]

    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]} if chat else {"prompt": "Hi"}
    async with doors(serve, ScriptedScheduler(script=script)) as (four, rig):
        answer = await four.ask_all(**prompt, n=4, max_tokens=12, seed=1)
        assert isinstance(answer, Answered)
        assert [choice.text for choice in answer.choices] == ["ab", "abcde", "abcdefghi", "abcdefghijkl"]
        assert [choice.reason for choice in answer.choices] == ["stop", "stop", "stop", "length"]
        assert answer.num_output_tokens == 3 + 6 + 10 + 12
        assert answer.num_prompt_tokens == len(rig.scheduler.submits[0].prompt_token_ids)


@pytest.mark.parametrize("num_before", [0, 5])
async def test_b75_what_fails_never_looks_finished(serve: Serve, num_before: int) -> None:
    async with doors(serve, ScriptedScheduler()) as (four, rig):
        for number, door in enumerate(DOORS, 1):
            call = asyncio.create_task(four.ask(door, prompt="Hi"))
            submit = await rig.scheduler.submitted(number)
            for token_id in b"abcde"[:num_before]:
                await rig.scheduler.give(submit, [token_id])
            await rig.scheduler.give(submit, [], finish=common_pb2.FINISH_REASON_ERROR, message="it broke")
            answer = await call
            assert isinstance(answer, Refused)
            assert answer.code == "INTERNAL"
            assert answer.text in {"", "abcde"[:num_before]}, "what was delivered stays valid"


@ANY_DOOR
async def test_b76_b94_a_full_queue_is_told_before_any_event(serve: Serve, door: str) -> None:
    scheduler = ScriptedScheduler()
    scheduler.accepts = False
    async with doors(serve, scheduler) as (four, rig):
        call = asyncio.create_task(four.ask(door, prompt="Hi"))
        submit = await rig.scheduler.submitted()
        full = {"message": "the queue is full", "status_code": 8, "retry_after_ms": 2500}
        await rig.scheduler.give(submit, [], finish=common_pb2.FINISH_REASON_ERROR, **full)
        assert await call == Refused("RESOURCE_EXHAUSTED")


async def test_b81_a_prompt_of_many_ids_is_answered_at_every_door(serve: Serve) -> None:
    roomy = ScriptedScheduler(script=letters("ok"), max_total_tokens=300_000)
    async with doors(serve, roomy) as (four, _):
        answer = await four.ask_all(prompt=[97, 98] * 100_000)
        assert isinstance(answer, Answered)
        assert (answer.only.text, answer.num_prompt_tokens) == ("ok", 200_000)
        assert await four.ask_all(prompt=[97] * 300_000) == Refused("INVALID_ARGUMENT", "prompt")
        assert isinstance(await four.ask_all(prompt="still there"), Answered)


@ANY_DOOR
async def test_b83_a_deadline_ends_what_runs_and_is_told(serve: Serve, door: str) -> None:
    async with doors(serve, ScriptedScheduler()) as (four, rig):
        answer = await four.ask(door, prompt="Hi", timeout=0.3)
        assert isinstance(answer, Refused)
        assert answer.code == "DEADLINE_EXCEEDED"
        await rig.scheduler.until(lambda: len(rig.scheduler.cancels) == 1)
        assert rig.scheduler.submits[0].remaining_ms <= 300


HUGE = 2**63 - 1
BAD_IDS = [272, 273, -1, 2**31 - 1, HUGE, -HUGE]
WRONG: list[tuple[str, str, dict[str, Any]]] = [
    *(("b46", "stop", {"stop": stop}) for stop in ("", [""], ["x", ""])),
    *(("b54", "top_p", {"top_p": value}) for value in (0, -1)),
    *(
        ("b55", name, {name: value})
        for name, values in {
            "temperature": (-1, 101, 1e30),
            "top_p": (7, 1.0001),
            "min_p": (-0.1, 1.1),
            "repetition_penalty": (0, -1, 1e30),
            "presence_penalty": (-2.1, 1e30),
            "frequency_penalty": (2.1, 1e30),
        }.items()
        for value in values
    ),
    ("b58", "min_tokens", {"min_tokens": 5, "max_tokens": 4}),
    ("b69", "logprobs", {"logprobs": 21}),
    ("b76", "model", {"model": "other"}),
    *(("b97", "prompt", {"prompt": [1, token_id]}) for token_id in BAD_IDS),
    *(
        ("b97", name, {name: [1, token_id]})
        for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids")
        for token_id in BAD_IDS
    ),
    ("b97", "logit_bias", {"logit_bias": {"272": 1}}),
    ("b99", "json_schema", {"json_schema": ""}),
    ("b99", "json_schema", {"json_schema": "x"}),
    ("b99", "json_schema", {"json_schema": "[]"}),
    ("b99", "json_schema", {"json_schema": "false"}),
    ("b99", "regex", {"regex": "("}),
    ("b99", "regex", {"regex": ""}),
    ("b99", "choice", {"choice": []}),
    ("b99", "choice", {"choice": ["a", ""]}),
    ("b99", "ignore_eos", {"regex": "a", "ignore_eos": True}),
    ("b100", "json_schema", {"json_schema": '{"x":"' + "x" * 65_536 + '"}'}),
    ("b101", "stop", {"stop": ["x"] * 100_000}),
    ("b101", "stop", {"stop": ["x" * 1_000_000]}),
    ("b101", "stop_token_ids", {"stop_token_ids": [1] * 100_000}),
    ("b101", "logit_bias", {"logit_bias": {str(token_id): 1 for token_id in range(4097)}}),
    ("b101", "messages", {"messages": [{"role": "user", "content": "x"}] * 4097}),
    ("b102", "n", {"n": 17}),
    ("b102", "n", {"n": 10**6}),
    ("b102", "max_tokens", {"max_tokens": 2**31 - 1}),
    ("b102", "max_tokens", {"max_tokens": HUGE}),
    ("b102", "prompt_logprobs", {"prompt_logprobs": -1}),
    ("b102", "prompt_logprobs", {"prompt_logprobs": 300}),
    ("priority", "priority", {"priority": 1001}),
    ("cache_salt", "cache_salt", {"cache_salt": "x" * 129}),
    ("request_id", "request_id", {"request_id": "é"}),
    ("request_id", "request_id", {"request_id": " a"}),
    ("request_id", "request_id", {"request_id": "a "}),
]


async def test_b46_b54_b55_b58_b97_b99_to_b102_the_same_refusal_by_name_at_every_door(serve: Serve) -> None:
    """Four streams run beside: they are not touched."""
    never_ending = ScriptedScheduler(script=lambda submit: [*submit.prompt_token_ids, tiny_model.EOS_ID])
    async with doors(serve, never_ending) as (four, rig):
        for case, name, fields in WRONG:
            prompt = {} if "messages" in fields else {"prompt": "Hi"}
            answer = await four.ask_all(**(prompt | fields))
            expected = "NOT_FOUND" if name == "model" else "INVALID_ARGUMENT"
            assert answer == Refused(expected, name), (case, fields if len(str(fields)) < 200 else name)
        assert not rig.scheduler.submits, "nothing of it went inward"
        beside = await asyncio.gather(*(four.ask(door, prompt="still right") for door in DOORS))
        assert [one.only.text for one in beside if isinstance(one, Answered)] == ["still right"] * 4


async def test_b78_a_prompt_has_one_start_token_as_text_and_as_a_chat(serve: Serve) -> None:
    async with doors(serve, ScriptedScheduler(script=letters("ok"))) as (four, rig):
        for prompt in ({"prompt": "Hi"}, {"messages": [{"role": "user", "content": "Hi"}]}):
            answer = await four.ask_all(**prompt)
            assert isinstance(answer, Answered)
            ids = rig.scheduler.submits[-1].prompt_token_ids
            assert answer.num_prompt_tokens == len(ids)
            assert list(ids).count(tiny_model.BOS_ID) <= 1


async def test_b79_streams_of_all_doors_at_once_keep_to_themselves(serve: Serve) -> None:
    """One reader of them is gone early; what the others get is not touched."""
    echoing = ScriptedScheduler(script=lambda submit: [*submit.prompt_token_ids, tiny_model.EOS_ID])
    async with doors(serve, echoing) as (four, rig):
        gone = asyncio.create_task(four.ask("http stream", prompt="gone " * 60))
        calls = [four.ask(door, prompt=f"stream {i} {door} " * 10) for i in range(4) for door in DOORS]
        answers = asyncio.gather(*calls)
        await rig.scheduler.submitted(1)
        gone.cancel()
        expected = [f"stream {i} {door} " * 10 for i in range(4) for door in DOORS]
        assert [one.only.text for one in await answers if isinstance(one, Answered)] == expected


@ANY_DOOR
async def test_b103_while_a_long_prompt_is_tokenized_others_are_served(
    serve: Serve, door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizing that never comes to an end holds up nobody."""
    begun, may_end = threading.Event(), threading.Event()
    encode = Tokenizer.encode

    def slow(self: Tokenizer, text: str, *, at_most: int | None = None) -> Sequence[int]:
        if len(text) > 100_000:
            begun.set()
            assert may_end.wait(60)
            return [97]
        return encode(self, text, at_most=at_most)

    async with doors(serve, ScriptedScheduler(script=letters("ok"))) as (four, rig):
        monkeypatch.setattr(Tokenizer, "encode", slow)
        try:
            long = asyncio.create_task(four.ask(door, prompt="x " * 200_000))
            assert await asyncio.to_thread(begun.wait, 60)
            answer = await four.ask_all(prompt="Hi")
            assert isinstance(answer, Answered)
            assert answer.only.text == "ok"
            assert (await rig.client.get("/health")).status_code == 200
            assert not long.done()
        finally:
            may_end.set()
        answered = await long
        assert isinstance(answered, Answered)
        assert answered.only.text == "ok"

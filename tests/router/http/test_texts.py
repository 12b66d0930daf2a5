"""What is said, said at every door: real prompts of many scripts, start tokens, log-probabilities as JSON."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from protos.v1 import common_pb2, router_pb2, scheduler_pb2
from router import model_files
from router.tokenizer import Tokenizer
from tests.rig import tiny_model
from tests.rig.scripted_scheduler import ScriptedScheduler
from tests.router import prompts
from tests.router.http.test_app import HttpRig, Serve, events, serve
from tests.router.stack import letters

__all__ = ["serve"]  # the fixture
STOP = common_pb2.FINISH_REASON_STOP
DATA = prompts.PROMPTS_FILE.parent


def rows(name: str) -> list[tuple[str, str]]:
    """File and prompt of each row. A line feed alone ends a row: prompts hold other line ends."""
    lines = (DATA / name).read_text(encoding="utf-8").split("\n")
    read = [json.loads(line) for line in lines if line]
    return [(row.get("file", name), row["prompt"]) for row in read]


ALL = [*rows("prompts.jsonl"), *rows("utf8_stress.jsonl")]
FILES = sorted({file for file, _ in ALL})
LONG = 200  # characters
AT_ONCE = 5  # ids: no script's characters have so many bytes, so these end within characters too


def said_back(submit: scheduler_pb2.Submit) -> list[int]:
    return [*submit.prompt_token_ids, tiny_model.EOS_ID]


async def at_every_door(rig: HttpRig, prompt: str) -> list[str]:
    """Streams get one id at a time, which cuts wherever it can be cut; answers as a whole get several."""
    rig.scheduler.tokens_a_step = 1
    message = router_pb2.GenerateRequest(text=prompt)
    deltas = [event.delta async for event in rig.router.stub.Generate(message) if event.HasField("delta")]
    streamed = "".join(delta.text for delta in deltas)
    if len(prompt) > LONG:  # said whole by the same log: one door of each kind will do
        rig.scheduler.tokens_a_step = AT_ONCE
        chunks = events((await rig.post("/v1/completions", prompt=prompt, stream=True)).text)
        return [streamed, "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])]
    chunks = events((await rig.post("/v1/completions", prompt=prompt, stream=True)).text)
    rig.scheduler.tokens_a_step = AT_ONCE
    unary = (await rig.router.stub.Complete(message)).choices[0]
    whole = (await rig.post("/v1/completions", prompt=prompt, return_token_ids=True)).json()
    ids = whole["choices"][0]["token_ids"]
    assert ids == list(unary.token_ids) == [token_id for delta in deltas for token_id in delta.token_ids]
    decoded = (await rig.post("/detokenize", tokens=ids)).json()["prompt"]
    joined = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    return [streamed, unary.text, whole["choices"][0]["text"], joined, decoded]


@pytest.mark.parametrize("file", FILES)
async def test_b49_b52_joined_deltas_are_the_whole_text_and_the_decoded_ids(serve: Serve, file: str) -> None:
    assert len(FILES) == 8
    scheduler = ScriptedScheduler(script=said_back, max_total_tokens=100_000)
    async with serve(scheduler) as rig:
        for prompt in (prompt for of_file, prompt in ALL if of_file == file):
            texts = await at_every_door(rig, prompt)
            assert set(texts) == {prompt}


async def test_b78_a_start_token_comes_once_at_both_doors(serve: Serve) -> None:
    async with serve(ScriptedScheduler(script=letters("x"))) as rig:
        hi = [{"role": "user", "content": "Hi"}]
        chat = (await rig.post("/v1/chat/completions", messages=hi)).json()
        submit = rig.scheduler.submits[-1]
        assert chat["usage"]["prompt_tokens"] == len(submit.prompt_token_ids)
        message = router_pb2.GenerateRequest(
            chat=router_pb2.Chat(messages=[router_pb2.Message(role="user", content="Hi")])
        )
        answer = await rig.router.stub.Complete(message)
        assert answer.prompt_info.num_prompt_tokens == len(submit.prompt_token_ids)
        assert rig.scheduler.submits[-1].prompt_token_ids == submit.prompt_token_ids
        assert (await rig.post("/tokenize", messages=hi)).json()["tokens"] == list(submit.prompt_token_ids)


def test_b78_a_template_and_a_tokenizer_that_both_know_it_write_it_once(tmp_path: Path) -> None:
    folder = tiny_model.build(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    from router.chat import ChatMessage

    tokenizer = Tokenizer(model_files.read(folder))
    ids = tokenizer.encode_chat([ChatMessage("user", "Hi")], [], add_generation_prompt=True)
    assert ids == [tiny_model.BOS_ID, *b"Hi"]


def logprobs_of(chosen: int, num_top: int) -> common_pb2.TokenLogprobs:
    """Of logits 9, 8, 7, 6 for the ids 97 to 100."""
    values = [-0.4402, -1.4402, -2.4402, -3.4402]
    return common_pb2.TokenLogprobs(
        token_id=97 + chosen,
        logprob=values[chosen],
        rank=chosen + 1,
        top_token_ids=range(97, 97 + num_top),
        top_logprobs=values[:num_top],
    )


@pytest.mark.parametrize("num_top", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_b66_b68_a_chosen_token_and_its_alternatives_at_both_shapes(
    serve: Serve, num_top: int, stream: bool
) -> None:
    async def answered(path: str, **body: Any) -> list[dict[str, Any]]:
        call = asyncio.create_task(rig.post(path, stream=stream, **body))
        submit = await rig.scheduler.submitted(len(rig.scheduler.submits) + 1)
        entries = [logprobs_of(0, num_top), logprobs_of(3, num_top)]
        await rig.scheduler.give(
            submit, [97, 100, tiny_model.EOS_ID], logprobs=[*entries, entries[1]], finish=STOP
        )
        response = await call
        json.loads(response.text.split("\n")[0].removeprefix("data: "), parse_constant=pytest.fail)
        chunks = events(response.text) if stream else [response.json()]
        return [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]

    async with serve() as rig:
        hi = [{"role": "user", "content": "Hi"}]
        chat = await answered("/v1/chat/completions", messages=hi, logprobs=True, top_logprobs=num_top)
        first, second = [entry for part in chat for entry in part["content"]][:2]
        assert (first["token"], second["token"]) == ("a", "d")
        assert math.isclose(first["logprob"], -0.4402, abs_tol=1e-4)
        assert math.isclose(second["logprob"], -3.4402, abs_tol=1e-4)
        for entry in (first, second):
            assert [top["token"] for top in entry["top_logprobs"]] == ["a", "b"][:num_top]
            values = [top["logprob"] for top in entry["top_logprobs"]]
            assert values == sorted(values, reverse=True)
        completion = await answered("/v1/completions", prompt="Hi", logprobs=num_top)
        tokens = [token for part in completion for token in part["tokens"]][:2]
        tops = [top for part in completion for top in part["top_logprobs"]][:2]
        assert tokens == ["a", "d"]
        assert [list(top) for top in tops] == [["a", "b"][:num_top]] * 2

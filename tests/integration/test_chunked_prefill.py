"""Kind 5: cutting a prompt into pieces changes the time line and nothing else."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from tests.integration.prompts import ids_of, prompt, sized
from tests.rig import cluster
from tests.rig.client import DOORS, client_of
from tests.rig.oracle import Oracle
from tests.rig.quiet import check_quiet
from tests.rig.scripted_executor import Script, expected_output
from tests.rig.watching import watching

LENGTHS = [15, 16, 17, 31, 32, 33, 49, 50]


@DOORS
async def test_b22_no_token_comes_before_the_last_chunk(
    door: str, tiny_model_folder: Path, tiny_oracle: Oracle
) -> None:
    flags = ("--max-num-batched-tokens", "16")
    cold = ("--no-prefix-caching",)  # else the longer prompts begin with what the shorter ones left
    with cluster.running(tiny_model_folder, executor_flags=flags, scheduler_flags=cold) as running:
        with watching(running) as watcher:
            async with client_of(running) as client:
                for length in LENGTHS:
                    answer = await client.ask(door, sized(length, 5, request_id=f"r{length}"))
                    assert len(answer.token_ids) == 5
                    tiny_oracle.check(prompt(length), answer.token_ids)
            steps = await asyncio.to_thread(watcher.steps_until_gone, f"r{LENGTHS[-1]}")
        for length in LENGTHS:
            own = [m for step in steps for m in step.members if m.request_id == f"r{length}"]
            chunks = math.ceil(length / 16)
            assert [member.prefill for member in own] == [True] * (chunks - 1) + [False] * 5
            assert sum(member.num_tokens for member in own[:chunks]) == length
        check_quiet(running, tiny_oracle)


@pytest.mark.parametrize("window", ["1", "2"])
async def test_b23_a_prompt_is_cut_to_what_decodes_leave_of_the_budget(
    window: str, tiny_model_folder: Path, tiny_oracle: Oracle
) -> None:
    with cluster.running(
        tiny_model_folder,
        executor_flags=("--max-num-batched-tokens", "8", "--max-num-seqs", "9"),
        scheduler_flags=("--window", window),
    ) as running:
        short = [sized(2, 12 + 4 * i, salt=i + 1) for i in range(8)]
        long = sized(60, 8, request_id="A")
        with watching(running) as watcher:
            async with client_of(running) as client:
                decoding = [client.growing(message) for message in short]
                for stream in decoding:
                    while not (await anext(stream)).token_ids:
                        pass
                answer = await client.generate(long)
                answers = [[answer async for answer in stream][-1] for stream in decoding]
            steps = await asyncio.to_thread(watcher.steps_until_gone, "A")
        tiny_oracle.check(ids_of(long), answer.token_ids)
        for message, other in zip(short, answers, strict=True):
            tiny_oracle.check(ids_of(message), other.token_ids)
        assert all(sum(member.num_tokens for member in step.members) <= 8 for step in steps)
        chunks = [
            (member.num_tokens, len(step.members) - 1)
            for step in steps
            for member in step.members
            if member.request_id == "A" and member.prefill
        ]
        assert chunks, "A is computed in pieces"
        assert all(num_tokens + num_decodes == 8 for num_tokens, num_decodes in chunks)
        check_quiet(running, tiny_oracle)


async def decode_rows_while_a_prompt_is_computed(
    folder: Path, num_prompt_tokens: int
) -> list[dict[str, Any]]:
    """The steps in which the prompt is computed, beside four streams that decode."""
    script = Script(max_num_batched_tokens=64, step_seconds=0.001)
    with cluster.running(folder, script=script) as running:
        async with client_of(running) as client:
            decoding = [client.growing(sized(3, 1_000, salt=i)) for i in range(4)]
            for stream in decoding:
                while len((await anext(stream)).token_ids) < 2:
                    pass
            answer = await client.generate(sized(num_prompt_tokens, 3, salt=9))
            assert answer.token_ids == expected_output(prompt(num_prompt_tokens, salt=9), 3)
            for stream in decoding:
                await stream.aclose()
        steps = running.scripted().steps()
        check_quiet(running)
    admitted = [[entry[2] for entry in step["admitted"]] for step in steps]
    first = next(i for i, lengths in enumerate(admitted) if num_prompt_tokens in lengths)
    seq_id = next(entry[0] for entry in steps[first]["admitted"])
    last = max(i for i, step in enumerate(steps) if seq_id in dict(step["rows"]))
    return steps[first : last + 1]


@pytest.mark.parametrize("num_prompt_tokens", [1_000, 4_000])
async def test_b24_a_long_prompt_does_not_stop_running_streams(
    num_prompt_tokens: int, tiny_model_folder: Path
) -> None:
    """Each running stream gets its token in every step, and a step never has more than T tokens: so the gap
    between two tokens is one step of T tokens, whatever the length of the new prompt."""
    steps = await decode_rows_while_a_prompt_is_computed(tiny_model_folder, num_prompt_tokens)
    assert len(steps) >= num_prompt_tokens // 64
    for step in steps:
        assert sum(count == 1 for _, count in step["rows"]) >= 4
        assert step["num_tokens"] <= 64

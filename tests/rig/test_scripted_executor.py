from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import pytest

from chairlift.step_driver import Epoch, ExecutorDriver, Failure, Stream, tokens_by_sequence
from protos.v1 import common_pb2
from rpc.address import Address
from rpc.channel import connect
from tests.rig.scripted_executor import (
    Fault,
    RequestScript,
    Script,
    ScriptedExecutor,
    expected_output,
    running,
)


@asynccontextmanager
async def streaming(executor: ScriptedExecutor) -> AsyncIterator[tuple[Epoch, Stream]]:
    channel = connect(Address.parse(executor.address, field="address"), max_message_bytes=1 << 20)
    async with channel:
        epoch = await ExecutorDriver(channel, timeout_seconds=20).open("test")
        async with epoch.stream() as stream:
            yield epoch, stream


@contextmanager
def scripted(folder: Path, **values: object) -> Iterator[ScriptedExecutor]:
    with running(Script(**values), folder) as executor:  # type: ignore[arg-type]
        yield executor


async def output_of(
    epoch: Epoch, stream: Stream, prompt: list[int], *, max_tokens: int = 3, **sampling: object
) -> list[int]:
    params = common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0, **sampling)  # type: ignore[arg-type]
    new = epoch.new(prompt, params)
    output: list[int] = []
    result = await stream.step(epoch.plan({new.seq_id: len(prompt)}, admit=[new]))
    while True:
        output += tokens_by_sequence(result)[new.seq_id]
        if result.finished:
            return output
        result = await stream.step(epoch.plan({new.seq_id: 1}))


def test_a_script_survives_json() -> None:
    script = Script(
        num_blocks=7,
        eos_token_ids=(1,),
        requests=(
            RequestScript(prompt=(1, 2), token_ids=(3,), row_errors={2: "no"}),
            RequestScript(logits=((0.5,),)),
        ),
        faults=(Fault(3, "stall", 0.5),),
    )
    assert Script.from_json(script.to_json()) == script


async def test_without_a_script_output_is_a_function_of_the_sequence_alone(tmp_path: Path) -> None:
    with scripted(tmp_path) as executor:
        async with streaming(executor) as (epoch, stream):
            first = await output_of(epoch, stream, [1, 2, 3], max_tokens=20)
            again = await output_of(epoch, stream, [1, 2, 3], max_tokens=20)
    assert first == again == expected_output([1, 2, 3], 20)


async def test_given_ids_come_by_prompt_or_in_order_of_admission(tmp_path: Path) -> None:
    requests = (
        RequestScript(token_ids=(5, 257)),
        RequestScript(prompt=(9, 9), token_ids=(6, 6, 259)),
        RequestScript(token_ids=(7,)),
    )
    with scripted(tmp_path, requests=requests) as executor:
        async with streaming(executor) as (epoch, stream):
            assert await output_of(epoch, stream, [9, 9]) == [6, 6, 259]
            assert await output_of(epoch, stream, [1]) == [5, 257]
            rest = expected_output([2, 7], 2)
            assert await output_of(epoch, stream, [2]) == [7, *rest]


async def test_given_logits_go_through_the_real_sampler(tmp_path: Path) -> None:
    requests = (RequestScript(logits=((9.0, 8.0, 7.0, 6.0), (0.0, 1.0))),)
    with scripted(tmp_path, requests=requests) as executor:
        async with streaming(executor) as (epoch, stream):
            params = common_pb2.SamplingParams(max_tokens=2, temperature=0, logprobs=2)
            new = epoch.new([1], params)
            first = await stream.step(epoch.plan({new.seq_id: 1}, admit=[new]))
            second = await stream.step(epoch.plan({new.seq_id: 1}))
    (chances,) = first.logprobs[0].tokens
    assert (list(first.token_ids), list(second.token_ids)) == ([0], [1])
    assert list(chances.top_token_ids) == [0, 1]
    assert list(chances.top_logprobs) == pytest.approx([-0.4402, -1.4402], abs=1e-4)


async def test_row_errors_and_nan_hurt_one_row(tmp_path: Path) -> None:
    requests = (RequestScript(prompt=(9,), row_errors={1: "bad grammar"}),)
    with scripted(tmp_path, requests=requests, faults=(Fault(3, "nan"),)) as executor:
        async with streaming(executor) as (epoch, stream):
            params = common_pb2.SamplingParams(max_tokens=9, temperature=0)
            a, b = epoch.new([9], params), epoch.new([8], params)
            await stream.step(epoch.plan({a.seq_id: 1, b.seq_id: 1}, admit=[a, b]))
            second = await stream.step(epoch.plan({a.seq_id: 1, b.seq_id: 1}))
            third = await stream.step(epoch.plan({b.seq_id: 1}))
    assert [(e.seq_id, e.message) for e in second.errors] == [(a.seq_id, "bad grammar")]
    assert list(second.seq_ids) == [b.seq_id]
    assert [e.seq_id for e in third.errors] == [b.seq_id]


async def test_it_dies_in_the_step_it_is_told_to(tmp_path: Path) -> None:
    with scripted(tmp_path, faults=(Fault(2, "die"),)) as executor:
        async with streaming(executor) as (epoch, stream):
            with pytest.raises(Failure, match="UNAVAILABLE"):
                await output_of(epoch, stream, [1, 2])
        assert executor.wait() == -9


async def test_a_device_failure_ends_the_epoch(tmp_path: Path) -> None:
    with scripted(tmp_path, faults=(Fault(1, "fail"),)) as executor:
        async with streaming(executor) as (epoch, stream):
            await stream.send(
                epoch.plan({1: 1}, admit=[epoch.new([1], common_pb2.SamplingParams(max_tokens=1))])
            )
            assert (await stream.end()).code is grpc.StatusCode.DATA_LOSS


async def test_a_context_with_an_unwritten_slot_is_a_failed_step(tmp_path: Path) -> None:
    with scripted(tmp_path) as executor:
        async with streaming(executor) as (epoch, stream):
            new = epoch.new(list(range(17)), common_pb2.SamplingParams(max_tokens=1), num_computed_tokens=16)
            await stream.send(epoch.plan({new.seq_id: 1}, admit=[new]))
            assert "no step has written" in (await stream.end()).details


async def test_each_step_is_logged_with_its_rows(tmp_path: Path) -> None:
    with scripted(tmp_path) as executor:
        async with streaming(executor) as (epoch, stream):
            output = await output_of(epoch, stream, [1, 2], max_tokens=2)
        first, second = executor.steps()
    assert (first["step_id"], first["rows"], first["admitted"]) == (1, [[1, 2]], [[1, 2, 2, 0]])
    assert (second["rows"], second["num_tokens"]) == ([[1, 1]], 1)
    assert second["finished"] == [[1, "length"]]
    assert first["sampled"]["1"] + second["sampled"]["1"] == output

"""A strict client: asks at either door, and takes an answer only if it keeps every promise of the contract.

Each stream is checked as it comes: Accepted first and once, offsets without gap or overlap, one Finished for
each choice and nothing of a choice after it. So whatever a test looks at, exactly-once is looked at too.
"""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from protos.v1 import common_pb2, router_pb2, router_pb2_grpc
from tests.rig.cluster import Cluster

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
DOORS = pytest.mark.parametrize("door", ["generate", "complete"])


@dataclass(slots=True)
class Choice:
    """One choice as its client has it."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    finished: router_pb2.Finished | None = None

    @property
    def reason(self) -> "common_pb2.FinishReason.ValueType":
        assert self.finished is not None
        return self.finished.reason


@dataclass(slots=True)
class Answer:
    """A whole answer."""

    accepted: router_pb2.Accepted
    choices: list[Choice]
    num_deltas: int = 0
    prompt_logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)

    @property
    def choice(self) -> Choice:
        """The only one."""
        assert len(self.choices) == 1
        return self.choices[0]

    @property
    def token_ids(self) -> list[int]:
        return self.choice.token_ids

    @property
    def text(self) -> str:
        return self.choice.text


def request(
    prompt: str | Sequence[int], *, max_tokens: int | None = None, ignore_eos: bool = True, **fields: Any
) -> router_pb2.GenerateRequest:
    """A greedy request that runs to its length; `fields` of the request or of its sampling change that."""
    of_sampling = common_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    sampling = {name: fields.pop(name) for name in list(fields) if name in of_sampling}
    message = router_pb2.GenerateRequest(
        sampling=common_pb2.SamplingParams(
            **({"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": ignore_eos} | sampling)
        ),
        **fields,
    )
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.ids.extend(prompt)
    return message


class Client:
    """Calls one router on the running event loop."""

    def __init__(self, stub: "router_pb2_grpc.RouterAsyncStub") -> None:
        self.stub = stub

    async def ask(
        self, door: str, message: router_pb2.GenerateRequest, timeout_seconds: float = 60.0
    ) -> Answer:
        """The answer at the door named `generate` (streamed) or `complete`. Raises grpc.aio.AioRpcError."""
        if door == "complete":
            return await self.complete(message, timeout_seconds)
        return await self.generate(message, timeout_seconds)

    async def complete(self, message: router_pb2.GenerateRequest, timeout_seconds: float = 60.0) -> Answer:
        response = await self.stub.Complete(message, timeout=timeout_seconds)
        assert [choice.index for choice in response.choices] == list(range(max(1, message.n)))
        return Answer(
            response.accepted,
            [
                _checked(Choice(list(item.token_ids), item.text, list(item.logprobs), item.finished))
                for item in response.choices
            ],
            prompt_logprobs=list(response.prompt_info.logprobs),
        )

    async def generate(self, message: router_pb2.GenerateRequest, timeout_seconds: float = 60.0) -> Answer:
        grown = [answer async for answer in self.growing(message, timeout_seconds)]
        answer = grown[-1]
        assert all(choice.finished is not None for choice in answer.choices), "the stream ended too early"
        return answer

    async def growing(
        self, message: router_pb2.GenerateRequest, timeout_seconds: float = 60.0
    ) -> AsyncGenerator[Answer]:
        """The same answer after each event; a reader that stops reading cancels the call."""
        call = self.stub.Generate(message, timeout=timeout_seconds)
        try:
            answer: Answer | None = None
            async for event in call:
                if answer is None:
                    assert event.WhichOneof("event") == "accepted", "Accepted comes first"
                    answer = Answer(event.accepted, [Choice() for _ in range(max(1, message.n))])
                else:
                    _take(answer, event)
                yield answer
        finally:
            call.cancel()


def _take(answer: Answer, event: router_pb2.GenerateEvent) -> None:
    match event.WhichOneof("event"):
        case "accepted":
            raise AssertionError("Accepted came twice")
        case "prompt_info":
            assert answer.num_deltas == 0, "PromptInfo came after a delta"
            answer.prompt_logprobs += event.prompt_info.logprobs
        case "delta":
            delta = event.delta
            choice = answer.choices[delta.index]
            assert choice.finished is None, "a delta came after the end"
            assert delta.offset == len(choice.token_ids), "a token is missing or came twice"
            assert delta.token_ids or delta.text, "a delta is empty"
            choice.token_ids += delta.token_ids
            choice.text += delta.text
            choice.logprobs += delta.logprobs
            answer.num_deltas += 1
        case "finished":
            choice = answer.choices[event.finished.index]
            assert choice.finished is None, "a choice ended twice"
            choice.finished = event.finished
            _checked(choice)


def _checked(choice: Choice) -> Choice:
    assert choice.finished is not None
    assert choice.finished.usage.num_output_tokens == len(choice.token_ids)
    assert len(choice.logprobs) in {0, len(choice.token_ids)}
    return choice


@contextlib.asynccontextmanager
async def client_of(cluster: Cluster, router: str = "router") -> AsyncIterator[Client]:
    """A client of one of the cluster's routers."""
    async with cluster.aio_channel(router) as channel:
        stub: router_pb2_grpc.RouterAsyncStub = router_pb2_grpc.RouterStub(channel)
        yield Client(stub)

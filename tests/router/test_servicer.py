"""The router as clients meet it, with the tiny model's tokenizer and a scheduler that a test speaks for."""

import asyncio
from pathlib import Path

import grpc
import pytest

import rpc.channel
from protos.v1 import common_pb2, router_pb2, router_pb2_grpc, scheduler_pb2
from protos.v1.router_pb2 import GenerateEvent, GenerateRequest
from router.kept_results import KeptResults
from router.scheduler_session import PART_TOKENS
from router.stop_strings import StopStrings
from router.text_stream import TextStream
from rpc.address import Address
from rpc.errors import from_call
from tests.rig import tiny_model
from tests.rig.scripted_scheduler import MAX_MESSAGE_BYTES, ScriptedScheduler
from tests.rig.swallowing_proxy import proxy
from tests.router.stack import Start, eventually, letters

LENGTH = common_pb2.FINISH_REASON_LENGTH
STOP = common_pb2.FINISH_REASON_STOP
ABORT = common_pb2.FINISH_REASON_ABORT
Sampling = common_pb2.SamplingParams


def text_request(text: str = "hi", **fields: object) -> GenerateRequest:
    return GenerateRequest(text=text, **fields)  # type: ignore[arg-type]


async def collect(call: "grpc.aio.UnaryStreamCall[GenerateRequest, GenerateEvent]") -> list[GenerateEvent]:
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


def deltas(events: list[GenerateEvent], index: int = 0) -> list[router_pb2.Delta]:
    return [e.delta for e in events if e.WhichOneof("event") == "delta" and e.delta.index == index]


def text_of(events: list[GenerateEvent], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas(events, index))


def finishes(events: list[GenerateEvent]) -> list[router_pb2.Finished]:
    return [event.finished for event in events if event.WhichOneof("event") == "finished"]


async def failure(call: "grpc.aio.Call") -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await (collect(call) if isinstance(call, grpc.aio.UnaryStreamCall) else call)
    return raised.value


# --- Generate ---------------------------------------------------------------------------------------


async def test_a_stream_begins_with_accepted_and_ends_with_finished(start: Start) -> None:
    async with start() as rig:
        call = rig.stub.Generate(text_request("hello", request_id="mine", sampling=Sampling(max_tokens=3)))
        submit = await rig.scheduler.submitted()
        assert bytes(submit.prompt_token_ids) == b"hello"
        assert submit.sampling.max_tokens == 3
        await rig.scheduler.give(submit, [97, 98], num_cached_tokens=2)
        await rig.scheduler.give(submit, [99], finish=LENGTH)
        events = await collect(call)
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds[0] == "accepted"
        assert kinds[1] == "prompt_info"
        assert kinds[-1] == "finished"
        assert set(kinds[2:-1]) == {"delta"}
        accepted, info, finished = events[0].accepted, events[1].prompt_info, events[-1].finished
        assert accepted.request_id == "mine"
        assert accepted.seed == submit.sampling.seed == accepted.sampling.seed
        assert accepted.sampling.temperature == 0.5
        assert (info.num_prompt_tokens, info.num_cached_tokens) == (5, 2)
        assert text_of(events) == "abc"
        assert [t for delta in deltas(events) for t in delta.token_ids] == [97, 98, 99]
        assert finished.reason == LENGTH
        assert (finished.usage.num_prompt_tokens, finished.usage.num_output_tokens) == (5, 3)
        assert 0 <= finished.timing.first_token_seconds <= finished.timing.total_seconds
        await rig.quiet()


async def test_a_request_without_an_id_gets_one_and_without_a_seed_one_is_drawn(start: Start) -> None:
    async with start(ScriptedScheduler(script=letters("x"))) as rig:
        first, second = [(await collect(rig.stub.Generate(text_request())))[0].accepted for _ in range(2)]
        assert first.request_id != second.request_id
        assert first.seed != second.seed


async def test_b62_choices_are_one_group_with_seeds_and_keys_of_their_own(start: Start) -> None:
    async with start(
        ScriptedScheduler(script=lambda s: [97 + s.sample_index] * (s.sample_index + 1) + [257])
    ) as rig:
        events = await collect(rig.stub.Generate(text_request(n=3, sampling=Sampling(seed=5))))
        submits = rig.scheduler.submits
        assert len({submit.group for submit in submits}) == 1
        assert len({submit.key for submit in submits}) == len({s.sampling.seed for s in submits}) == 3
        assert submits[0].sampling.seed == 5
        assert [text_of(events, index) for index in range(3)] == ["a", "bb", "ccc"]
        assert sorted(finished.index for finished in finishes(events)) == [0, 1, 2]
        assert [event.WhichOneof("event") for event in events].count("prompt_info") == 1


async def test_b49_a_character_of_several_tokens_comes_whole(start: Start) -> None:
    async with start(ScriptedScheduler(script=letters("a😀b"))) as rig:
        events = await collect(rig.stub.Generate(text_request()))
        assert text_of(events) == "a😀b"
        assert "\ufffd" not in "".join(delta.text for delta in deltas(events))
        assert finishes(events)[0].usage.num_output_tokens == 7


async def test_b41_a_stop_string_cuts_the_text_and_cancels_the_sequence(start: Start) -> None:
    async with start() as rig:
        call = rig.stub.Generate(text_request(stop=["DEFGHIJ"]))
        submit = await rig.scheduler.submitted()
        for piece in (" ABC", "DEF", "G", "HI", "J", "K"):
            await rig.scheduler.give(submit, list(piece.encode()))
        events = await collect(call)
        assert text_of(events) == " ABC"
        (finished,) = finishes(events)
        assert (finished.reason, finished.stop) == (STOP, "DEFGHIJ")
        assert finished.usage.num_output_tokens == 11
        await rig.scheduler.until(lambda: bool(rig.scheduler.cancels))
        assert [(c.key, c.reason) for c in rig.scheduler.cancels] == [(submit.key, STOP)]
        await rig.quiet()


async def test_logprobs_come_with_their_tokens(start: Start) -> None:
    async with start() as rig:
        call = rig.stub.Generate(text_request(sampling=Sampling(logprobs=1, max_tokens=2)))
        submit = await rig.scheduler.submitted()
        rows = [
            common_pb2.TokenLogprobs(token_id=t, logprob=-1, rank=1, top_token_ids=[t], top_logprobs=[-1])
            for t in (97, 98)
        ]
        await rig.scheduler.give(submit, [97, 98], logprobs=rows, finish=LENGTH)
        events = await collect(call)
        assert [row for delta in deltas(events) for row in delta.logprobs] == rows


class SlowReader:
    """A call whose client takes nothing until it is told to."""

    def __init__(self) -> None:
        self.events: list[GenerateEvent] = []
        self.reads = asyncio.Event()

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def write(self, event: GenerateEvent) -> None:
        await self.reads.wait()
        self.events.append(event)

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: object) -> None:
        raise Aborted(code, details)


class Aborted(Exception):  # noqa: N818 - it is what happened
    """The status with which a call ended."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


async def test_b88_what_a_slow_reader_has_not_taken_is_one_delta(start: Start) -> None:
    async with start() as rig:
        reader = SlowReader()
        call = asyncio.create_task(rig.servicer.Generate(text_request(), reader))  # type: ignore[arg-type]
        submit = await rig.scheduler.submitted()
        for _ in range(100):
            await rig.scheduler.give(submit, list(b"abc"))
        await rig.scheduler.give(submit, [257], finish=STOP)
        await rig.scheduler.until(lambda: 101 in rig.scheduler.acks)  # taken in while nobody read
        reader.reads.set()
        await call
        assert text_of(reader.events) == "abc" * 100
        assert len(deltas(reader.events)) == 1
        await rig.quiet()


async def test_b28_a_second_request_of_a_live_id_is_refused_and_the_first_untouched(start: Start) -> None:
    async with start() as rig:
        first = rig.stub.Generate(text_request(request_id="twice"))
        submit = await rig.scheduler.submitted()
        error = await failure(rig.stub.Complete(text_request(request_id="twice")))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        await rig.scheduler.give(submit, [97, 257], finish=STOP, matched_token_id=257)
        events = await collect(first)
        assert text_of(events) == "a"
        assert finishes(events)[0].token_id == 257
        again = await collect(rig.stub.Generate(text_request(request_id="twice")))
        assert text_of(again) == "a", "it has ended, and is told again"
        assert len(rig.scheduler.submits) == 1
        other = rig.stub.Generate(text_request("another", request_id="twice"))
        await rig.scheduler.give(await rig.scheduler.submitted(2), [98, 257], finish=STOP)
        assert text_of(await collect(other)) == "b"


# --- resuming ---------------------------------------------------------------------------------------


def resumed(request: GenerateRequest, accepted: router_pb2.Accepted, *received: list[int]) -> GenerateRequest:
    """The same request, going on after these ids of each choice."""
    again = GenerateRequest()
    again.CopyFrom(request)
    again.request_id = accepted.request_id
    again.resume.resume_token = accepted.resume_token
    for index, token_ids in enumerate(received):
        again.resume.received.add(index=index, token_ids=token_ids)
    return again


async def test_b106_a_resume_takes_the_stream_over_and_the_older_reader_ends_aborted(start: Start) -> None:
    async with start() as rig:
        request = text_request()
        older = rig.stub.Generate(request)
        first = await rig.scheduler.submitted()
        await rig.scheduler.give(first, list(b"abc"))
        accepted = (await older.read()).accepted
        newer = rig.stub.Generate(resumed(request, accepted, [97, 98]))
        second = await rig.scheduler.submitted(2)
        assert (await failure(older)).code() is grpc.StatusCode.ABORTED
        assert (second.key, second.body_digest, second.sampling) == (
            first.key,
            first.body_digest,
            first.sampling,
        )
        assert list(second.output_token_ids) == [97, 98]
        assert second.accepted_before
        assert not rig.scheduler.cancels, "the sequence lives on"
        await rig.scheduler.give(second, [*b"cd", 257], finish=STOP)
        events = await collect(newer)
        assert events[0].accepted == accepted
        assert deltas(events)[0].offset == 2
        assert text_of(events) == "cd"
        assert finishes(events)[0].usage.num_output_tokens == 5
        await rig.quiet()


async def test_b106_what_has_ended_is_told_again_from_where_its_client_is(start: Start) -> None:
    async with start(ScriptedScheduler(script=letters("hello😀"))) as rig:
        request = text_request(n=2, stop=["nowhere"])
        whole = await collect(rig.stub.Generate(request))
        accepted = whole[0].accepted
        ids = [[t for d in deltas(whole, index) for t in d.token_ids] for index in range(2)]
        await eventually(lambda: rig.intake.num_live == 0)
        again = await collect(rig.stub.Generate(resumed(request, accepted, ids[0][:7], ids[1])))
        assert text_of(again, 0) == "😀", "half a character was held back, and comes whole"
        assert text_of(again, 1) == ""
        assert finishes(again)[1].usage == finishes(whole)[1].usage
        assert len(rig.scheduler.submits) == 2
        await rig.quiet()


async def test_a_request_that_comes_again_is_told_the_log_probabilities_of_its_prompt_again(
    start: Start,
) -> None:
    scheduler = ScriptedScheduler()
    scheduler.welcome.features.append("prompt_logprobs")
    of_prompt = [common_pb2.TokenLogprobs(token_id=ord("i"), logprob=-1, rank=1)]
    async with start(scheduler) as rig:
        request = text_request("hi", request_id="again", sampling=Sampling(prompt_logprobs=0))
        for count in (1, 2):
            call = rig.stub.Generate(request)
            submit = await rig.scheduler.submitted(count)
            output = scheduler_pb2.StepOutput()
            output.prompt_logprobs.add(handle=submit.handle, first_position=1, tokens=of_prompt)
            await rig.scheduler.send(output)
            await rig.scheduler.give(submit, [97], finish=LENGTH)
            info = next(e.prompt_info for e in await collect(call) if e.WhichOneof("event") == "prompt_info")
            assert list(info.logprobs) == of_prompt
            await rig.quiet()


@pytest.mark.parametrize("cut", range(9))
async def test_b106_a_resumed_text_goes_on_exactly_whatever_was_held_back(start: Start, cut: int) -> None:
    async with start(ScriptedScheduler(script=letters("ab😀stop"))) as rig:
        request = text_request(stop=["stops", "b😀so"], sampling=Sampling(logprobs=None, seed=3))
        whole = await collect(rig.stub.Generate(request))
        ids = [t for d in deltas(whole) for t in d.token_ids]
        # Another router, which has neither log nor result: the scheduler has the rest.
        rig.intake._kept = KeptResults()
        again = await collect(rig.stub.Generate(resumed(request, whole[0].accepted, ids[:cut])))
        certain = TextStream(
            rig.intake.model.tokenizer.detokenizer(), StopStrings(tuple(request.stop), include=False)
        )
        assert certain.push(ids[:cut]).text + text_of(again) == text_of(whole) == "ab😀stop"


async def test_a_choice_whose_received_ids_hold_its_stop_string_ends_at_once(start: Start) -> None:
    async with start() as rig:
        request = text_request(stop=["bc"])
        call = rig.stub.Generate(request)
        submit = await rig.scheduler.submitted()
        await rig.scheduler.give(submit, list(b"ab"))
        accepted = (await call.read()).accepted
        events = await collect(rig.stub.Generate(resumed(request, accepted, list(b"abc"))))
        assert (finishes(events)[0].reason, finishes(events)[0].stop) == (STOP, "bc")
        assert text_of(events) == ""
        await rig.scheduler.until(lambda: bool(rig.scheduler.cancels))
        assert rig.scheduler.cancels[0].key == submit.key


async def test_a_bad_resume_is_refused_by_name_and_harms_nothing(start: Start) -> None:
    async with start() as rig:
        request = text_request(request_id="mine", n=2, sampling=Sampling(max_tokens=4))
        call = rig.stub.Generate(request)
        first, second = await rig.scheduler.submitted(), await rig.scheduler.submitted(2)
        accepted = (await call.read()).accepted

        async def refused(asked: GenerateRequest, code: grpc.StatusCode, words: str, field: str) -> None:
            refusal = from_call(await failure(rig.stub.Generate(asked)))
            assert refusal.code is code
            assert words in refusal.message
            assert refusal.field == field

        good = resumed(request, accepted, [97], [98])
        invalid = grpc.StatusCode.INVALID_ARGUMENT
        token = "resume.resume_token"
        nonsense, forged, foreign, unnamed, other = (
            GenerateRequest.FromString(good.SerializeToString()) for _ in range(5)
        )
        nonsense.resume.resume_token = "nonsense"
        await refused(nonsense, invalid, "no token of this version", token)
        forged.resume.resume_token = good.resume.resume_token[:-4] + "AAAA"
        await refused(forged, grpc.StatusCode.PERMISSION_DENIED, "was not given by this cluster", token)
        foreign.request_id = "yours"
        await refused(foreign, grpc.StatusCode.PERMISSION_DENIED, "'yours'", token)
        unnamed.request_id = ""
        await refused(unnamed, invalid, "request_id that Accepted told", "request_id")
        other.text = "ho"
        await refused(other, invalid, "differs from the one that was accepted", "resume")
        for received, words in [
            ([[97], [98], [99]], "received[2].index is 2"),
            ([[97, 999]], "received[0].token_ids[1] is 999"),
            ([[97] * 5], "5 ids; max_tokens of this request is 4"),
            ([[97, 257, 97]], "go on at [2] behind the end"),
        ]:
            refusal = from_call(await failure(rig.stub.Generate(resumed(request, accepted, *received))))
            assert refusal.code is invalid
            assert words in refusal.message
        doubled = resumed(request, accepted, [97])
        doubled.resume.received.add(index=0)
        await refused(
            doubled, invalid, "received[1].index is 0, which an earlier entry has", "resume.received[1].index"
        )
        assert from_call(await failure(rig.stub.Complete(good))).field == "resume"
        for submit in (first, second):
            await rig.scheduler.give(submit, [97, 257], finish=STOP)
        events = [GenerateEvent(accepted=accepted), *await collect(call)]
        assert [text_of(events, index) for index in range(2)] == ["a", "a"]
        assert len(rig.scheduler.submits) == 2
        await rig.quiet()


async def test_ids_that_differ_from_the_live_ones_are_gone_on_from(start: Start) -> None:
    async with start() as rig:
        request = text_request()
        call = rig.stub.Generate(request)
        await rig.scheduler.give(await rig.scheduler.submitted(), list(b"abc"))
        accepted = (await call.read()).accepted
        newer = rig.stub.Generate(resumed(request, accepted, list(b"xy")))
        submit = await rig.scheduler.submitted(2)
        assert bytes(submit.output_token_ids) == b"xy"
        await rig.scheduler.give(submit, [*b"z", 257], finish=STOP)
        assert text_of(await collect(newer)) == "z"


async def test_a_repeated_request_without_a_seed_uses_the_seed_that_was_drawn(start: Start) -> None:
    async with start() as rig:
        seeds = []
        for _ in range(2):
            call = rig.stub.Generate(text_request(request_id="mine"))
            seeds.append((await rig.scheduler.submitted(len(seeds) + 1)).sampling.seed)
            call.cancel()
            await rig.quiet()
        assert seeds[0] == seeds[1]


# --- readers that stall -----------------------------------------------------------------------------


async def test_b88_a_client_that_takes_nothing_is_cut_and_its_request_given_up(start: Start) -> None:
    async with start(client_stall_seconds=0.2) as rig:
        reader = SlowReader()
        with pytest.raises(Aborted) as cut:
            await asyncio.wait_for(rig.servicer.Generate(text_request(), reader), 20)  # type: ignore[arg-type]
        assert cut.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "nothing of the stream was taken for 0.2 seconds" in cut.value.details
        await rig.scheduler.until(lambda: bool(rig.scheduler.cancels))
        await rig.quiet()


async def test_b88_a_client_too_many_logprobs_behind_is_cut(start: Start) -> None:
    async with start(ScriptedScheduler(max_total_tokens=10_000)) as rig:
        reader = SlowReader()
        request = text_request(sampling=Sampling(logprobs=0, max_tokens=5000))
        call = asyncio.create_task(rig.servicer.Generate(request, reader))  # type: ignore[arg-type]
        submit = await rig.scheduler.submitted()
        row = common_pb2.TokenLogprobs(token_id=97, logprob=-1, rank=1)
        await rig.scheduler.give(submit, [97] * 3000, logprobs=[row] * 3000)
        with pytest.raises(Aborted, match="2048 tokens with log-probabilities behind"):
            await asyncio.wait_for(call, 20)


# --- Complete ---------------------------------------------------------------------------------------


async def test_b72_complete_tells_the_same_story_as_the_stream(start: Start) -> None:
    async with start(ScriptedScheduler(script=letters("Grüße, 😀!"))) as rig:
        request = text_request(n=2, stop=["!"], sampling=Sampling(seed=1))
        response = await rig.stub.Complete(request)
        events = await collect(rig.stub.Generate(request))
        for choice in response.choices:
            assert choice.text == text_of(events, choice.index) == "Grüße, 😀"
            assert list(choice.token_ids) == [t for d in deltas(events, choice.index) for t in d.token_ids]
            assert choice.finished.stop == "!"
        streamed = {finished.index: finished for finished in finishes(events)}
        assert [c.finished.usage for c in response.choices] == [streamed[i].usage for i in range(2)]
        assert response.accepted.sampling == events[0].accepted.sampling
        assert response.prompt_info.num_prompt_tokens == 2


async def test_b75_an_error_in_any_choice_fails_the_call(start: Start) -> None:
    async with start() as rig:
        call = rig.stub.Complete(text_request(n=2))
        await rig.scheduler.submitted(2)
        first, second = rig.scheduler.submits
        await rig.scheduler.give(first, [97], finish=LENGTH)
        await rig.scheduler.give(
            second, [97], finish=common_pb2.FINISH_REASON_ERROR, message="the logits are NaN", status_code=13
        )
        error = await failure(call)
        assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "the logits are NaN")
        await rig.quiet()


async def test_b75_text_before_an_error_is_delivered_and_the_stream_fails(start: Start) -> None:
    async with start() as rig:
        call = rig.stub.Generate(text_request(n=2))
        await rig.scheduler.submitted(2)
        first, second = rig.scheduler.submits
        await rig.scheduler.give(first, list(b"abcde"))
        events = [await call.read() for _ in range(3)]
        await rig.scheduler.give(
            first,
            [],
            finish=common_pb2.FINISH_REASON_ERROR,
            message="too busy",
            status_code=8,
            retry_after_ms=2500,
        )
        assert text_of(events) == "abcde"
        refusal = from_call(await failure(call))
        assert (refusal.code, refusal.retry_after_seconds) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 2.5)
        await rig.scheduler.until(lambda: bool(rig.scheduler.cancels))
        assert [cancel.key for cancel in rig.scheduler.cancels] == [second.key]
        await rig.quiet()


# --- cancels and deadlines --------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["Generate", "Complete"])
@pytest.mark.parametrize("tokens_before", [0, 3])
async def test_b25_b29_a_cancelled_call_gives_up_every_choice(
    start: Start, method: str, tokens_before: int
) -> None:
    async with start() as rig:
        call = getattr(rig.stub, method)(text_request(n=4))
        await rig.scheduler.submitted(4)
        for submit in rig.scheduler.submits[:4]:
            if tokens_before:
                await rig.scheduler.give(submit, [97] * tokens_before)
        call.cancel()
        await rig.scheduler.until(lambda: len(rig.scheduler.cancels) == 4)
        assert {cancel.key for cancel in rig.scheduler.cancels} == {s.key for s in rig.scheduler.submits}
        assert {cancel.reason for cancel in rig.scheduler.cancels} == {ABORT}
        await rig.quiet()


async def test_b82_a_client_whose_packets_are_dropped_is_given_up_by_keepalive(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's pings decide, here each second; the client never says that it is gone."""
    monkeypatch.setattr(rpc.channel, "KEEPALIVE_SECONDS", 1)
    monkeypatch.setattr(rpc.channel, "KEEPALIVE_TIMEOUT_SECONDS", 1)
    async with start() as rig, proxy(tmp_path / "proxy.sock", tmp_path / "router.sock") as between:
        monkeypatch.setattr(rpc.channel, "KEEPALIVE_SECONDS", 3600)  # the client's own would notice too
        address = Address.parse(f"unix:{between.path}", field="")
        async with rpc.channel.connect(address, max_message_bytes=MAX_MESSAGE_BYTES) as channel:
            call = router_pb2_grpc.RouterStub(channel).Generate(text_request())
            submit = await rig.scheduler.submitted()
            await rig.scheduler.give(submit, [97])
            while not (event := await call.read()).HasField("delta"):
                pass
            assert event.delta.text == "a"
            between.swallow()
            await rig.scheduler.until(lambda: bool(rig.scheduler.cancels))
            assert rig.scheduler.cancels[0].key == submit.key
            await rig.quiet()
            call.cancel()


async def test_b82_a_cancel_is_passed_on_even_when_the_client_does_not_read(start: Start) -> None:
    async with start(ScriptedScheduler(max_total_tokens=300_000)) as rig:
        call = rig.stub.Generate(text_request(sampling=Sampling(max_tokens=200_000)))
        submit = await rig.scheduler.submitted()
        for _ in range(100):
            await rig.scheduler.give(submit, [97] * 1000)
        await eventually(lambda: 100 in rig.scheduler.acks)
        call.cancel()
        await rig.scheduler.until(lambda: bool(rig.scheduler.cancels))
        await rig.quiet()


@pytest.mark.parametrize("method", ["Generate", "Complete"])
async def test_b83_what_is_left_of_the_deadline_goes_inward_and_ends_the_request(
    start: Start, method: str
) -> None:
    async with start() as rig:
        call = getattr(rig.stub, method)(text_request(), timeout=0.5)
        submit = await rig.scheduler.submitted()
        assert 0 < submit.remaining_ms <= 500
        error = await failure(call)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await rig.scheduler.until(lambda: bool(rig.scheduler.cancels))
        await rig.quiet()


async def test_a_deadline_that_the_scheduler_notices_first_is_told_as_such(start: Start) -> None:
    async with start() as rig:
        call = rig.stub.Generate(text_request(), timeout=30)
        submit = await rig.scheduler.submitted()
        await rig.scheduler.give(submit, [], finish=common_pb2.FINISH_REASON_DEADLINE)
        assert (await failure(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_without_a_deadline_none_is_told(start: Start) -> None:
    async with start() as rig:
        call = rig.stub.Generate(text_request())
        assert not (await rig.scheduler.submitted()).HasField("remaining_ms")
        call.cancel()


# --- a scheduler that goes and comes ----------------------------------------------------------------


async def test_b106_a_broken_stream_is_invisible_to_the_client(start: Start) -> None:
    async with start() as rig:
        call = rig.stub.Generate(text_request(request_id="r"))
        first = await rig.scheduler.submitted()
        await rig.scheduler.give(first, list(b"abc"))
        await eventually(lambda: 1 in rig.scheduler.acks)
        rig.scheduler.break_streams()
        second = await rig.scheduler.submitted(2)
        assert second.key == first.key
        assert bytes(second.output_token_ids) == b"abc"
        assert second.accepted_before
        assert second.sampling == first.sampling
        await rig.scheduler.give(second, [*b"def", 257], finish=STOP, matched_token_id=257)
        events = await collect(call)
        assert text_of(events) == "abcdef"
        assert deltas(events)[0].offset == 0
        assert finishes(events)[0].usage.num_output_tokens == 7


async def test_b92_with_a_recovery_timeout_of_zero_running_requests_end_unavailable(start: Start) -> None:
    async with start(recovery_timeout_seconds=0) as rig:
        call = rig.stub.Generate(text_request())
        await rig.scheduler.give(await rig.scheduler.submitted(), list(b"abc"))
        events = [await call.read() for _ in range(3)]
        rig.scheduler.break_streams()
        assert (await failure(call)).code() is grpc.StatusCode.UNAVAILABLE
        assert text_of(events) == "abc"
        await rig.serving()  # the same scheduler, back again


async def test_b92_the_recovery_timeout_has_a_timer_of_its_own(start: Start) -> None:
    async with start(recovery_timeout_seconds=0.2) as rig:
        call = rig.stub.Complete(text_request())
        await rig.scheduler.submitted()
        rig.scheduler.welcome = None  # it comes back, but never gets an executor
        rig.scheduler.break_streams()
        error = await failure(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        await rig.quiet()


async def test_b91_while_the_scheduler_does_not_serve_requests_are_unavailable_with_its_reason(
    start: Start,
) -> None:
    async with start() as rig:
        await rig.scheduler.set_serving(serving=False, reason="every executor is gone")
        await eventually(lambda: rig.pool.refusal is not None)
        error = await failure(rig.stub.Generate(text_request()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "every executor is gone" in str(error.details())
        await rig.scheduler.set_serving(serving=True)
        await rig.serving()


async def test_b86_without_a_scheduler_requests_are_unavailable(start: Start) -> None:
    async with start(ready=False, served=False) as rig:
        for call in (rig.stub.Generate(text_request()), rig.stub.Complete(text_request())):
            assert (await failure(call)).code() is grpc.StatusCode.UNAVAILABLE
        error = await failure(rig.stub.GetModel(router_pb2.GetModelRequest()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_tokenizer_that_does_not_belong_to_the_model_is_not_served(start: Start) -> None:
    scheduler = ScriptedScheduler()
    assert scheduler.welcome is not None
    scheduler.welcome.fingerprints.tokenizer = "of another model"
    async with start(scheduler, ready=False) as rig:
        await eventually(lambda: "does not belong" in (rig.pool.refusal or ""))
        error = await failure(rig.stub.Generate(text_request()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "of another model" in str(error.details())


async def test_a_scheduler_that_breaks_the_protocol_loses_its_stream_and_nothing_else(start: Start) -> None:
    async with start() as rig:
        call = rig.stub.Complete(text_request())
        submit = await rig.scheduler.submitted()
        await rig.scheduler.give(submit, [97])
        await rig.scheduler.send(
            scheduler_pb2.StepOutput(handles=[submit.handle], num_tokens=[2], token_ids=[98])
        )
        again = await rig.scheduler.submitted(2)
        assert list(again.output_token_ids) == [97]
        await rig.scheduler.give(again, [98, 257], finish=STOP)
        assert (await call).choices[0].text == "ab"


async def test_a_client_that_asks_again_with_the_seed_it_was_told_gets_the_rest(start: Start) -> None:
    async with start(recovery_timeout_seconds=0) as rig:
        request = text_request()
        first = rig.stub.Generate(request)
        submit = await rig.scheduler.submitted()
        await rig.scheduler.give(submit, list("aé".encode())[:2])  # it breaks in the middle of a character
        events = [await first.read() for _ in range(3)]
        rig.scheduler.break_streams()
        assert (await failure(first)).code() is grpc.StatusCode.UNAVAILABLE
        shown = text_of(events)
        request.sampling.seed = events[0].accepted.seed
        await rig.serving()
        again = rig.stub.Generate(request)
        repeated = await rig.scheduler.submitted(2)
        assert repeated.sampling == submit.sampling
        assert not repeated.output_token_ids
        await rig.scheduler.give(repeated, [*"aéb".encode(), 257], finish=STOP)
        assert text_of(await collect(again)) == shown + "éb"


# --- the door ---------------------------------------------------------------------------------------


async def test_b34_b37_a_wrong_request_is_refused_naming_the_field_and_others_go_on(start: Start) -> None:
    async with start(ScriptedScheduler(max_total_tokens=64)) as rig:
        running = rig.stub.Generate(text_request(sampling=Sampling(max_tokens=2)))
        submit = await rig.scheduler.submitted()
        wrong = {
            "prompt": text_request("x" * 64),
            "text": text_request(""),
            "sampling.temperature": text_request(sampling=Sampling(temperature=float("nan"))),
            "token_ids": GenerateRequest(token_ids=router_pb2.TokenIds(ids=[1, -1])),
            "chat.messages": GenerateRequest(chat=router_pb2.Chat()),
            "sampling.max_tokens": text_request(sampling=Sampling(max_tokens=63)),
        }
        for field, request in wrong.items():
            for call in (rig.stub.Generate(request), rig.stub.Complete(request)):
                error = await failure(call)
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert from_call(error).field == field
        assert len(rig.scheduler.submits) == 1
        await rig.scheduler.give(submit, [97, 98], finish=LENGTH)
        assert text_of(await collect(running)) == "ab"
        await rig.quiet()


async def test_unknown_fields_are_refused(start: Start) -> None:
    async with start() as rig:
        request = GenerateRequest.FromString(text_request().SerializeToString() + bytes([0xF8, 0x3E, 0x01]))
        error = await failure(rig.stub.Generate(request))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "1007" in str(error.details())


async def test_fields_not_served_yet_are_unimplemented_by_name(start: Start) -> None:
    async with start() as rig:
        error = await failure(rig.stub.Generate(text_request(sampling=Sampling(frequency_penalty=0.5))))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "sampling.frequency_penalty" in str(error.details())


async def test_b81_a_long_prompt_arrives_whole_through_its_parts(start: Start) -> None:
    async with start(ScriptedScheduler(max_total_tokens=1_000_000)) as rig:
        ids = [i % 250 for i in range(3 * PART_TOKENS + 5)]
        call = rig.stub.Complete(
            GenerateRequest(token_ids=router_pb2.TokenIds(ids=ids), sampling=Sampling(max_tokens=1))
        )
        submit = await rig.scheduler.submitted()
        assert list(submit.prompt_token_ids) == ids
        parts = [m.submit for m in rig.scheduler.messages if m.WhichOneof("message") == "submit"]
        assert max(len(part.prompt_token_ids) for part in parts[1:]) <= PART_TOKENS
        await rig.scheduler.give(submit, [97], finish=LENGTH)
        assert (await call).prompt_info.num_prompt_tokens == len(ids)


async def test_a_chat_goes_through_the_template(start: Start) -> None:
    async with start(ScriptedScheduler(script=letters("ok"))) as rig:
        chat = router_pb2.Chat(messages=[router_pb2.Message(role="user", content="Hi")])
        await rig.stub.Complete(GenerateRequest(chat=chat))
        tokenized = await rig.stub.Tokenize(router_pb2.TokenizeRequest(chat=chat))
        assert list(rig.scheduler.submits[0].prompt_token_ids) == list(tokenized.token_ids)
        assert tokenized.token_ids[0] == tiny_model.IM_START_ID


# --- the small calls --------------------------------------------------------------------------------


async def test_tokenize_and_detokenize_are_inverse(start: Start) -> None:
    async with start() as rig:
        for text in ("héllo 😀", "x" * 5000):
            tokenized = await rig.stub.Tokenize(router_pb2.TokenizeRequest(text=text))
            assert bytes(tokenized.token_ids) == text.encode()
            assert tokenized.max_total_tokens == 512
            request = router_pb2.DetokenizeRequest(token_ids=tokenized.token_ids)
            assert (await rig.stub.Detokenize(request)).text == text


async def test_b97_detokenize_refuses_ids_outside_the_vocabulary(start: Start) -> None:
    async with start() as rig:
        for wrong in (272, -1, 2**63 - 1):
            error = await failure(rig.stub.Detokenize(router_pb2.DetokenizeRequest(token_ids=[1, wrong])))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert str(wrong) in str(error.details())


async def test_special_tokens_show_when_asked_for(start: Start) -> None:
    async with start() as rig:
        ids = [97, tiny_model.EOS_ID]
        assert (await rig.stub.Detokenize(router_pb2.DetokenizeRequest(token_ids=ids))).text == "a"
        shown = router_pb2.DetokenizeRequest(token_ids=ids, include_special=True)
        assert (await rig.stub.Detokenize(shown)).text == "a<|eos|>"


async def test_get_model_tells_limits_and_defaults(start: Start) -> None:
    async with start(max_tokens=7) as rig:
        model = await rig.stub.GetModel(router_pb2.GetModelRequest(model="tiny"))
        assert (model.model, model.max_total_tokens, model.vocab_size) == ("tiny", 512, 272)
        assert list(model.eos_token_ids) == [257]
        assert (model.defaults.temperature, model.defaults.max_tokens) == (0.5, 7)
        assert model.has_chat_template
        assert model.fingerprints.model == "m"
        assert model.max_message_bytes == MAX_MESSAGE_BYTES


async def test_another_model_is_not_found_everywhere(start: Start) -> None:
    async with start() as rig:
        for call in (
            rig.stub.Generate(text_request(model="other")),
            rig.stub.Complete(text_request(model="other")),
            rig.stub.Tokenize(router_pb2.TokenizeRequest(model="other", text="a")),
            rig.stub.Detokenize(router_pb2.DetokenizeRequest(model="other")),
            rig.stub.GetModel(router_pb2.GetModelRequest(model="other")),
        ):
            assert (await failure(call)).code() is grpc.StatusCode.NOT_FOUND


async def test_watch_and_explain_are_the_schedulers_answers(start: Start) -> None:
    scheduler = ScriptedScheduler()
    scheduler.summaries = [router_pb2.StepSummary(executor_id="e", step_id=step) for step in (1, 2, 3)]
    async with start(scheduler) as rig:
        summaries = [summary async for summary in rig.stub.Watch(router_pb2.WatchRequest())]
        assert [summary.step_id for summary in summaries] == [1, 2, 3]
        error = await failure(rig.stub.Explain(router_pb2.ExplainRequest(request_id="r")))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_b87_draining_waits_for_the_last_request(start: Start) -> None:
    async with start() as rig:
        call = rig.stub.Complete(text_request())
        submit = await rig.scheduler.submitted()
        draining = asyncio.create_task(rig.intake.drain())
        await asyncio.sleep(0)
        assert not draining.done()
        await rig.scheduler.give(submit, [97, 257], finish=STOP)
        await call
        await draining

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from chairlift import conformance
from chairlift.checking import STOP
from chairlift.conformance import Outcome, Verdict
from chairlift.protocol_checks import CHECKS
from chairlift.step_driver import ExecutorDriver
from protos.v1 import executor_pb2_grpc
from rpc.address import Address
from rpc.channel import connect
from tests.chairlift.fake_router import FakeRouter, listening
from tests.chairlift.toys import serving
from tests.rig import scripted_executor, service_process, tiny_model, toy_executor
from tests.rig.scripted_executor import Script


async def verdicts(address: str, *, timeout_seconds: float = 30.0) -> tuple[int, dict[str, Outcome]]:
    outcomes: list[Outcome] = []
    code = await conformance.run(address, outcomes.append, timeout_seconds=timeout_seconds)
    return code, {outcome.name: outcome for outcome in outcomes}


def failures(outcomes: dict[str, Outcome]) -> list[str]:
    return [f"{o.name}: {o.sentence}" for o in outcomes.values() if o.verdict is Verdict.FAILED]


# None of constraints: its runner has no text.
FEATURES = ("logprobs", "prompt_logprobs", "penalties", "logit_bias", "token_lists", "draft_tokens")


DRAFTS = {
    "entries of draft tokens fit",
    "draft tokens fit their row",
    "draft tokens are acknowledged first",
    "right draft tokens are taken",
    "wrong draft tokens are forgotten",
    "an end among draft tokens ends",
    "draft tokens change no choice",
}


@pytest.mark.parametrize("window", [1, 2, 3])
async def test_the_scripted_executor_conforms(tmp_path: Path, window: int) -> None:
    script = Script(window=window, draws=True, features=FEATURES, max_seq_len=256)
    with scripted_executor.running(script, tmp_path) as executor:
        code, outcomes = await verdicts(executor.address)
    assert failures(outcomes) == []
    assert (code, len(outcomes)) == (0, len(CHECKS))
    skipped = {name for name, outcome in outcomes.items() if outcome.verdict is Verdict.SKIPPED}
    of_two = {"window two", "ghosts", "draft tokens are acknowledged first"}
    assert skipped == (set() if window > 1 else of_two)


async def test_the_toy_executor_written_from_the_protocols_page_conforms(tmp_path: Path) -> None:
    with service_process.running("tests.rig.toy_executor", f"unix:{tmp_path}/toy.sock") as executor:
        code, outcomes = await verdicts(executor.address)
    assert failures(outcomes) == []
    assert code == 0


def with_a_real_model(folder: Path) -> list[str]:
    model = tiny_model.build(folder / "tiny", max_seq_len=512)
    return [
        *("--model", str(model), "--listen", f"unix:{folder}/e.sock"),
        *("--dtype", "float32", "--num-blocks", "256", "--num-threads", "1"),
    ]


async def test_our_executor_conforms_with_a_real_model(tmp_path: Path) -> None:
    with service_process.running("executor", *with_a_real_model(tmp_path)) as executor:
        code, outcomes = await verdicts(executor.address)
    assert failures(outcomes) == []
    assert {outcome.verdict for outcome in outcomes.values()} == {Verdict.PASSED}
    assert code == 0


async def test_our_executor_conforms_when_it_launches_a_step_before_the_one_before_is_settled(
    tmp_path: Path,
) -> None:
    with service_process.running("tests.rig.late_executor", *with_a_real_model(tmp_path)) as executor:
        code, outcomes = await verdicts(executor.address)
    assert failures(outcomes) == []
    skipped = {name for name, outcome in outcomes.items() if outcome.verdict is Verdict.SKIPPED}
    # Plain torch does not promise that, and a step launched early cannot know where the next one begins.
    assert {"batch changes nothing", *DRAFTS} == skipped
    assert code == 0


async def test_an_executor_that_takes_one_token_a_step_conforms_as_far_as_it_can_be_asked(
    tmp_path: Path,
) -> None:
    script = Script(max_num_batched_tokens=1, max_num_seqs=1, block_size=1)
    with scripted_executor.running(script, tmp_path) as executor:
        code, outcomes = await verdicts(executor.address)
    assert failures(outcomes) == []
    assert code == 0
    assert "needs 4 tokens a step" in outcomes["generates to length"].sentence


# --- executors that do not conform ------------------------------------------------------------------


def runs_duplicates_again(executor: toy_executor.ToyExecutor) -> None:
    answer = toy_executor.Epoch.answer

    def answer_anew(self: toy_executor.Epoch, plan: Any) -> Any:
        if plan.step_id in self.kept:
            del self.kept[plan.step_id]
            self.last = plan.step_id - 1
        return answer(self, plan)

    toy_executor.Epoch.answer = answer_anew  # type: ignore[method-assign]


def believes_any_position(executor: toy_executor.ToyExecutor) -> None:
    check = toy_executor.check

    def lenient(holds: bool, sentence: str) -> None:
        if "positions_sum" not in sentence:
            check(holds, sentence)

    toy_executor.check = lenient


def never_ends_at_a_stop_id(executor: toy_executor.ToyExecutor) -> None:
    init = toy_executor.Sequence.__init__

    def without_stops(self: toy_executor.Sequence, new: Any) -> None:
        init(self, new)
        self.ends = set()

    toy_executor.Sequence.__init__ = without_stops  # type: ignore[method-assign]


def reports_ghosts(executor: toy_executor.ToyExecutor) -> None:
    run_row = toy_executor.Epoch.run_row

    def run_row_of_ghost(self: toy_executor.Epoch, result: Any, sequence: Any, *row: Any) -> None:
        if sequence.ended_step is not None:
            result.seq_ids.append(sequence.new.seq_id)
            result.num_sampled.append(0)
        run_row(self, result, sequence, *row)

    toy_executor.Epoch.run_row = run_row_of_ghost  # type: ignore[method-assign]


def lets_the_older_stream_live(executor: toy_executor.ToyExecutor) -> None:
    end_streams = executor.end_streams

    def only_at_open(status: grpc.StatusCode, before: int) -> None:
        if status is not grpc.StatusCode.ABORTED:
            end_streams(status, before)

    executor.end_streams = only_at_open  # type: ignore[method-assign]


def lets_anybody_in(executor: toy_executor.ToyExecutor) -> None:
    open_ = executor.Open

    async def open_to_all(request: Any, context: Any) -> Any:
        executor.holder, executor.term = "", 0
        return await open_(request, context)

    executor.Open = open_to_all  # type: ignore[method-assign]


@pytest.fixture
async def start_toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a toy executor in this process, spoiled by a function; the toy's module is mended afterwards."""
    for owner, name in [
        (toy_executor.Epoch, "answer"),
        (toy_executor.Epoch, "run"),
        (toy_executor.Epoch, "run_row"),
        (toy_executor.Sequence, "end"),
        (toy_executor.Sequence, "__init__"),
        (toy_executor, "check"),
    ]:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    async with contextlib.AsyncExitStack() as stack:

        async def start(spoil: Callable[[toy_executor.ToyExecutor], None]) -> str:
            executor = toy_executor.ToyExecutor()
            spoil(executor)
            return await stack.enter_async_context(serving(executor, tmp_path))

        yield start


@pytest.mark.parametrize(
    ("spoil", "failing"),
    [
        (runs_duplicates_again, "duplicate is answered once computed"),
        (believes_any_position, "positions agree"),
        (never_ends_at_a_stop_id, "stop id ends"),
        (reports_ghosts, "ghosts"),
        (lets_the_older_stream_live, "newest stream wins"),
        (lets_anybody_in, "lower term is refused"),
    ],
)
async def test_an_executor_that_breaks_a_rule_fails_the_check_of_that_rule(
    start_toy: Callable[..., Awaitable[str]],
    spoil: Callable[[toy_executor.ToyExecutor], None],
    failing: str,
) -> None:
    address = await start_toy(spoil)
    code, outcomes = await verdicts(address, timeout_seconds=1.0)
    assert code == 1
    assert outcomes[failing].verdict is Verdict.FAILED
    assert outcomes["plan without rows"].verdict is Verdict.PASSED


def stops_at_the_third_token(executor: toy_executor.ToyExecutor) -> None:
    end = toy_executor.Sequence.end

    def end_early(self: toy_executor.Sequence, token: int) -> Any:
        num_output = len(self.tokens) - self.new.num_prompt_tokens
        return end(self, token) or ((STOP, token) if num_output == 3 else None)

    toy_executor.Sequence.end = end_early  # type: ignore[method-assign]


def ends_a_token_early(executor: toy_executor.ToyExecutor) -> None:
    init = toy_executor.Sequence.__init__

    def with_less(self: toy_executor.Sequence, new: Any) -> None:
        init(self, new)
        self.sampling = type(new.sampling)()
        self.sampling.CopyFrom(new.sampling)
        self.sampling.max_tokens -= 1

    toy_executor.Sequence.__init__ = with_less  # type: ignore[method-assign]


def answers_for_the_next_sequence(executor: toy_executor.ToyExecutor) -> None:
    run = toy_executor.Epoch.run

    def run_otherwise(self: toy_executor.Epoch, plan: Any) -> Any:
        result = run(self, plan)
        result.seq_ids[:] = [seq_id + 1 for seq_id in result.seq_ids]
        return result

    toy_executor.Epoch.run = run_otherwise  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "spoil", [stops_at_the_third_token, ends_a_token_early, answers_for_the_next_sequence]
)
async def test_whatever_an_executor_answers_is_a_verdict_and_the_other_checks_run(
    start_toy: Callable[..., Awaitable[str]], spoil: Callable[[toy_executor.ToyExecutor], None]
) -> None:
    code, outcomes = await verdicts(await start_toy(spoil), timeout_seconds=1.0)
    assert code == 1
    assert len(outcomes) == len(CHECKS)
    assert outcomes["stop id ends"].verdict is Verdict.FAILED
    assert outcomes["plan without rows"].verdict is Verdict.PASSED
    assert not any("could not be read" in outcome.sentence for outcome in outcomes.values())


async def test_a_check_that_stumbles_over_an_answer_fails_with_a_sentence() -> None:
    async def an_odd_check(_: Any) -> None:
        {}["seq_id"]

    subject: Any = None
    found = await conformance.judged(an_odd_check, subject)
    assert found.verdict is Verdict.FAILED
    assert found.name == "an odd check"
    assert found.sentence == "what the executor answered could not be read (KeyError: 'seq_id')"


def test_how_long_an_answer_is_waited_for_can_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []

    async def run(address: str, report: object, *, certificates: object, timeout_seconds: float) -> int:
        told.append(timeout_seconds)
        return 0

    monkeypatch.setattr(conformance, "run", run)
    assert conformance.main(["--timeout", "1.5", "unix:/x"]) == conformance.main(["unix:/x"]) == 0
    assert told == [1.5, 60]


async def test_without_an_executor_there_is_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def said_of(address: str) -> str:
        assert await asyncio.to_thread(conformance.main, [address]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        return err.removeprefix(f"chairlift conformance: the executor at {address} could not be tested: ")

    nobody = f"unix:{tmp_path}/nobody.sock"
    assert await said_of(nobody) == "it cannot be reached (nobody answers)\n"
    async with listening(FakeRouter(), tmp_path) as router:
        assert (await said_of(router)).startswith("there is something else than an executor (UNIMPLEMENTED: ")
    with scripted_executor.running(Script(), tmp_path) as executor:
        here = Address.parse(executor.address, field="")
        async with connect(here, max_message_bytes=1024 * 1024) as channel:
            epoch = await ExecutorDriver(channel, timeout_seconds=10).open("the-scheduler")
            async with epoch.stream() as stream:  # is held as long as this is there
                await stream.step(epoch.plan())
                said = await said_of(executor.address)
    assert said.startswith("a scheduler holds it; stop that first (PERMISSION_DENIED: ")
    assert "the-scheduler" in said


async def test_an_executor_that_fails_to_open_fails(tmp_path: Path) -> None:
    class Failing(executor_pb2_grpc.ExecutorServicer):
        async def Open(self, request: Any, context: Any) -> Any:  # noqa: N802 - the contract's name
            raise ZeroDivisionError

    server = grpc.aio.server()
    executor_pb2_grpc.add_ExecutorServicer_to_server(Failing(), server)
    address = f"unix:{tmp_path}/e.sock"
    server.add_insecure_port(address)
    await server.start()
    try:
        code, outcomes = await verdicts(address)
    finally:
        await server.stop(None)
    assert code == 1
    assert list(outcomes) == ["open"]
    assert "cannot be opened" in outcomes["open"].sentence


def test_a_word_that_is_no_address_is_a_sentence_and_exit_code_two(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert conformance.main(["nonsense"]) == 2
    assert capsys.readouterr().err.startswith("chairlift conformance: ADDRESS is 'nonsense'")


async def test_the_command_prints_a_line_for_each_check_and_exits_with_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with service_process.running("tests.rig.toy_executor", f"unix:{tmp_path}/toy.sock") as executor:
        code = await asyncio.to_thread(conformance.main, [executor.address])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert len(lines) == len(CHECKS) + 1
    assert lines[-1] == "the executor conforms"

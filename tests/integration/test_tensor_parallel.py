"""A model on several ranks, as processes: the ids of one rank, and an end of all when one of them ends."""

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from chairlift import conformance
from chairlift.conformance import Outcome, Verdict
from protos.v1 import executor_pb2, executor_pb2_grpc, router_pb2
from tests.integration.prompts import sized
from tests.rig import cluster, service_process, tiny_model
from tests.rig.client import Client, client_of
from tests.rig.cluster import Cluster
from tests.rig.quiet import check_quiet, wait_until_idle

pytestmark = pytest.mark.timeout(300)  # up to seven processes import torch at once

RANKS = {"alone": 1, "two": 2, "four": 4}
NUM_TOKENS = 40  # long enough that they meet, however fast the steps
FEW_BLOCKS = 10


def children_of(pid: int) -> list[int]:
    """Its processes, in the order in which it started them."""
    listed = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for task in listed for child in task.read_text().split())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight heads of which two read the same keys: four ranks have a key-value head each."""
    folder = tmp_path_factory.mktemp("model")
    return tiny_model.build(folder, num_heads=8, num_kv_heads=4, hidden_size=128, vocab_size=275)


@pytest.fixture(scope="module")
def ranks(model: Path) -> Iterator[Cluster]:
    """Executors of one rank, two and four, started side by side; a test asks one at a time."""
    with cluster.assembling(model) as running:
        for name, size in RANKS.items():
            running.start_executor("--tensor-parallel", str(size), "--num-blocks", "256", name=name)
        yield running


def requests() -> list[router_pb2.GenerateRequest]:
    """Greedy and seeded, short and long, with penalties and log-probabilities among them."""
    return [
        sized(40, NUM_TOKENS, salt=1),
        sized(5, NUM_TOKENS, salt=2, temperature=0.9, seed=7),
        sized(23, NUM_TOKENS, salt=3, repetition_penalty=1.2, logprobs=2),
        sized(70, NUM_TOKENS, salt=4, temperature=0.7, top_p=0.9, seed=11),
        sized(3, NUM_TOKENS, salt=5, prompt_logprobs=1),
        sized(33, NUM_TOKENS, salt=6, temperature=1.1, top_k=20, seed=13),
    ]


async def ids_at_once(running: Cluster, executor: str) -> list[list[int]]:
    """What the executor makes of all requests together, in chunks, with too few blocks for all of them."""
    if "scheduler" in running.names:
        running.stop("scheduler")
    flags = ("--num-blocks", str(FEW_BLOCKS), "--max-num-batched-tokens", "24")
    more = ("--scheduler-id", "the-ranks-test", "--watermark", "0", "--admission", "optimistic")
    running.start_scheduler(*flags, *more, executors=[executor])
    if "router" not in running.names:
        running.start_router()
    running.wait()
    async with client_of(running) as client:
        answers = await asyncio.gather(*(client.generate(message, 120) for message in requests()))
    assert running.load().num_preemptions > 0
    wait_until_idle(running)
    return [answer.token_ids for answer in answers]


async def test_ids_equal_those_of_one_rank_in_mixed_batches_and_after_preemptions(ranks: Cluster) -> None:
    alone = await ids_at_once(ranks, "alone")
    assert {len(ids) for ids in alone} == {NUM_TOKENS}
    assert await ids_at_once(ranks, "two") == alone
    assert await ids_at_once(ranks, "four") == alone


async def test_it_conforms_and_promises_row_invariance_that_a_start_has_tried_out(ranks: Cluster) -> None:
    """The last to use this executor: the checks take it from its scheduler."""
    ranks.process("two").wait_until_serving()
    outcomes: list[Outcome] = []
    assert await conformance.run(ranks.address("two"), outcomes.append, timeout_seconds=60) == 0
    others = {each.name: each.verdict for each in outcomes if each.verdict is not Verdict.PASSED}
    assert others == {"longest sequence ends": Verdict.SKIPPED}  # it is too long to be computed
    for name in RANKS:
        opened = executor_pb2_grpc.ExecutorStub(ranks.channel(name)).Open(
            executor_pb2.OpenRequest(scheduler_id="asker", term=1_000_000), timeout=30
        )
        assert opened.row_invariant, name


async def test_told_to_stop_all_ranks_end_well(ranks: Cluster) -> None:
    """The last to use any of them."""
    for name in ("two", "four"):
        others = children_of(ranks.process(name).pid)
        assert len(others) == RANKS[name] - 1
        assert ranks.stop(name) == 0
        assert not any(map(is_running, others))


def is_running(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


# --- the end of one is the end of all ----------------------------------------------------------------


async def begun(
    client: Client, messages: Sequence[router_pb2.GenerateRequest]
) -> "list[asyncio.Task[list[int]]]":
    """Streams of the requests, each with a token at least, that go on by themselves."""
    first = [asyncio.Event() for _ in messages]

    async def read(index: int) -> list[int]:
        ids: list[int] = []
        async for answer in client.growing(messages[index], 120):
            ids = answer.token_ids if answer.choices[0].token_ids else ids
            if ids:
                first[index].set()
        return ids

    tasks = [asyncio.create_task(read(index)) for index in range(len(messages))]
    async with asyncio.timeout(60):
        await asyncio.gather(*(event.wait() for event in first))
    return tasks


async def test_a_rank_killed_under_load_ends_the_executor_and_the_requests_go_on_at_the_next(
    model: Path,
) -> None:
    messages = [sized(20, 80, salt=salt) for salt in range(3)]
    flags = ("--tensor-parallel", "2", "--num-blocks", "256")
    with cluster.running(model, executor_flags=flags) as running:
        async with client_of(running) as client:
            first = running.process("executor")
            tasks = await begun(client, messages)
            (other,) = children_of(first.pid)
            os.kill(other, signal.SIGKILL)
            assert await asyncio.to_thread(first.wait, 30) == 1
            assert f"rank 1 of 2 (process {other}) was killed by SIGKILL" in first.stderr
            assert not any(task.done() for task in tasks)
            running.restart("executor")
            streamed = await asyncio.gather(*tasks)
            again = await asyncio.gather(*(client.complete(message) for message in messages))
            assert streamed == [answer.token_ids for answer in again]
        check_quiet(running)
        # And the other way round: the first rank gone, the other one does not stay.
        (other,) = children_of(running.process("executor").pid)
        running.kill("executor")
        async with asyncio.timeout(30):
            while is_running(other):  # noqa: ASYNC110 - it is no child of ours
                await asyncio.sleep(0.02)


@pytest.mark.soak
def test_heads_that_do_not_divide_are_one_sentence_and_no_rank_stays(tmp_path: Path) -> None:
    folder = tiny_model.build(tmp_path / "tiny", num_heads=6, num_kv_heads=3, hidden_size=96)
    flags = ["--model", str(folder), "--listen", f"unix:{tmp_path}/e.sock", "--tensor-parallel", "2"]
    with service_process.running("executor", *flags, "--log-level", "error", wait=False) as executor:
        assert executor.wait() == 2
    (sentence,) = executor.stderr.splitlines()
    assert sentence.startswith(
        "chairlift executor: a model of 6 attention heads and 3 key-value heads cannot be shared out over 2 "
    )


@pytest.mark.soak
async def test_torchrun_may_start_the_ranks(model: Path, tmp_path: Path) -> None:
    command = ["--standalone", "--nproc-per-node", "2", "-m", "executor", "--model", str(model)]
    flags = ["--listen", f"unix:{tmp_path}/e.sock", "--dtype", "float32", "--num-blocks", "256"]
    with service_process.running("torch.distributed.run", *command, *flags) as torchrun:
        outcomes: list[Outcome] = []
        assert await conformance.run(torchrun.address, outcomes.append, timeout_seconds=60) == 0
        _, other = children_of(torchrun.pid)
        os.kill(other, signal.SIGKILL)
        assert await asyncio.to_thread(torchrun.wait, 60) != 0
        assert not any(map(is_running, children_of(torchrun.pid)))

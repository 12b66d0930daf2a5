"""Log-probabilities of prompts on their way through the scheduler: each once, right whatever happens."""

from array import array
from dataclasses import replace

import pytest

from scheduler.policy import Admission
from scheduler.router_session import RouterSession
from scheduler.sequence import Sequence, StatusCode
from tests.rig.checking_executor import prompt_report
from tests.scheduler.harness import EXECUTOR, Harness
from tests.scheduler.test_prefix_cache import WINDOWS, harness, prompt, serve


def told(seq: Sequence) -> list[object]:
    assert seq.prompt_logprobs is not None
    return seq.prompt_logprobs


def right(ids: list[int]) -> list[object]:
    return [prompt_report(position, ids[position]) for position in range(1, len(ids))]


@WINDOWS
@pytest.mark.parametrize("budget", [1, 7, 16, 256])
def test_b71_they_are_whole_and_in_order_however_the_prompt_is_cut(window: int, budget: int) -> None:
    h = harness(window, max_num_batched_tokens=budget)
    ids = prompt(48)
    seq = serve(h, "r", ids, want_prompt_logprobs=True)
    assert told(seq) == right(ids)


def test_a_prompt_of_one_token_has_none() -> None:
    seq = serve(harness(), "r", [5], want_prompt_logprobs=True)
    assert told(seq) == []


@WINDOWS
def test_b20_a_cached_prefix_is_not_taken_and_is_no_miss(window: int) -> None:
    h = harness(window)
    ids = prompt(48)
    serve(h, "cold", ids)
    cache = h.core.executors[EXECUTOR].cache
    asked_before = cache.num_query_tokens
    seq = serve(h, "asking", ids, want_prompt_logprobs=True)
    assert (seq.num_cached_tokens, told(seq)) == (0, right(ids))
    assert cache.num_query_tokens == asked_before
    assert serve(h, "warm", ids).num_cached_tokens == 32


def test_b20_one_that_asks_does_not_wait_for_a_prefix_it_cannot_use() -> None:
    h = harness(max_num_batched_tokens=16)
    ids = prompt(48)
    h.submit("first", ids, 4, ignore_eos=True)
    h.step()
    seq = h.submit("asking", ids, 4, ignore_eos=True, want_prompt_logprobs=True)
    h.run_to_end()
    h.check_outputs()
    assert told(seq) == right(ids)


@WINDOWS
def test_b11_a_preempted_prompt_is_told_once_and_goes_on_where_it_was(window: int) -> None:
    h = harness(window, num_blocks=8, admission=Admission.OPTIMISTIC, max_num_batched_tokens=20)
    names = ["a", "b", "c"]
    prompts = {name: prompt(40, salt) for salt, name in enumerate(names)}
    for name in names:
        h.submit(name, prompts[name], 30, ignore_eos=True, want_prompt_logprobs=True)
    h.run_to_end()
    h.check_outputs()
    assert h.core.counters.preemptions >= 1
    for name in names:
        assert told(h.sequences[name]) == right(prompts[name])


@WINDOWS
@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
def test_b20_a_lost_executor_costs_no_position_and_doubles_none(window: int, num_steps: int) -> None:
    h = harness(window, max_num_batched_tokens=16)
    ids = prompt(60)
    seq = h.submit("r", ids, 8, ignore_eos=True, want_prompt_logprobs=True)
    for _ in range(num_steps):
        h.step()
    known = len(told(seq))
    h.core.detach(EXECUTOR, h.now)
    h.attach()
    h.plans.clear()
    h.plan()
    (admitted,) = h.plans[0].admitted
    assert admitted.prompt_logprobs_from == (known + 1 if known < 59 else None)
    h.run_to_end()
    h.check_outputs()
    assert told(seq) == right(ids)


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("count", [0, 2, 4])
def test_what_does_not_fit_ends_its_sequence_and_no_other(first: int, count: int) -> None:
    h = harness(1)
    asking = h.submit("asking", prompt(4), 8, ignore_eos=True, want_prompt_logprobs=True)
    h.submit("other", prompt(4, 1), 8, ignore_eos=True)
    h.plan()
    result = h.executor.run()
    wrong = replace(result, prompt_logprobs={asking.seq_id: (first, ["x"] * count)})
    outcome = h.core.update(EXECUTOR, wrong, h.now)
    assert outcome.ended == [asking]
    assert asking.finish is not None
    assert asking.finish.status_code is StatusCode.INTERNAL
    assert asking.num_output_tokens == 0
    del h.sequences["asking"]
    h.run_to_end()
    h.check_outputs()


def test_each_reader_gets_them_from_the_start_and_each_once() -> None:
    h = harness(1, max_num_batched_tokens=5)
    ids = prompt(12)
    seq = h.submit("r", ids, 3, ignore_eos=True, want_prompt_logprobs=True)
    first, second = RouterSession("one"), RouterSession("one")
    first.attach(7, seq, 0)
    got: list[object] = []
    for _ in range(2):
        h.step()
        first._mark(seq.attachment)  # type: ignore[arg-type]
        output = first.take(0.0)
        assert output is not None
        for handle, position, entries in output.prompt_logprobs:
            assert (handle, position) == (7, len(got) + 1)
            got += entries
    assert got == right(ids)[: len(got)] != []
    second.attach(3, seq, 0)
    h.run_to_end()
    output = second.take(0.0)
    assert output is not None
    assert output.prompt_logprobs == [(3, 1, right(ids))]
    assert output.num_tokens == [3]


def test_a_reader_who_lacks_them_is_not_attached_to_one_that_was_computed_without() -> None:
    h = harness(1)
    request = h.request("r", prompt(8), 6, ignore_eos=True)
    h.core.submit(request, now=h.now)
    h.step()
    seq = h.core.submit(replace(request, want_prompt_logprobs=True), array("I"), now=h.now)
    h.run_to_end()
    assert told(seq) == right(prompt(8))


def test_abilities_are_those_that_every_executor_has() -> None:
    h = Harness()
    assert h.core.features == frozenset()
    h.core.detach(EXECUTOR, h.now)
    for name, features in {"one": {"logprobs", "penalties"}, "two": {"penalties", "logit_bias"}}.items():
        h.core.attach(name, 5, replace(h.capacity, features=frozenset(features)), h.now)
    assert h.core.features == {"penalties"}
    h.core.detach("one", h.now)
    assert h.core.features == {"penalties", "logit_bias"}

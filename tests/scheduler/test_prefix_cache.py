import random
from array import array

import pytest

from scheduler.policy import Admission, Limits
from scheduler.sequence import FinishReason, Sequence, State
from tests.rig.checking_executor import expected_output
from tests.scheduler.harness import EXECUTOR, Harness

WINDOWS = pytest.mark.parametrize("window", [1, 2])


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + salt) % 90 for i in range(length)]


def harness(
    window: int = 2,
    *,
    caching: bool = True,
    admission: Admission = Admission.FORECAST,
    **capacities: int,
) -> Harness:
    values = {"num_blocks": 64, "block_size": 16, "max_seq_len": 1024, "max_num_batched_tokens": 256}
    limits = Limits(window=window, watermark=0.0, prefix_caching=caching, admission=admission)
    return Harness(limits, **(values | capacities))


def serve(h: Harness, name: str, ids: list[int], max_tokens: int = 8, **fields: object) -> Sequence:
    """One request, alone, to its end; its output is the undisturbed one."""
    seq = h.submit(name, ids, max_tokens, ignore_eos=True, **fields)
    h.run_to_end()
    assert list(seq.output_token_ids()) == expected_output(seq.request)[0]
    return seq


@WINDOWS
@pytest.mark.parametrize("length", [16, 32, 48])
def test_b14_a_wholly_cached_prompt_still_computes_one_token(window: int, length: int) -> None:
    h = harness(window)
    hits = [serve(h, f"r{i}", prompt(length)).num_cached_tokens for i in range(3)]
    assert hits == [0, length - 16, length - 16]
    twins = [h.submit(f"t{i}", prompt(length), 8, ignore_eos=True) for i in range(2)]
    h.run_to_end()
    h.check_outputs()
    assert all(seq.num_cached_tokens <= length - 1 for seq in twins)


def test_b16_salts_do_not_see_each_other() -> None:
    h = harness()
    salts = ["red", "blue", "", "red"]
    hits = [serve(h, f"r{i}", prompt(64), cache_salt=salt).num_cached_tokens for i, salt in enumerate(salts)]
    assert hits == [0, 0, 0, 48]


@WINDOWS
def test_b17_an_evicted_block_is_not_found_again(window: int) -> None:
    h = harness(window, num_blocks=10)
    serve(h, "A", prompt(64))
    for i in range(20):
        serve(h, f"other{i}", prompt(64, i + 1))
    assert serve(h, "A again", prompt(64)).num_cached_tokens == 0
    rng = random.Random(5)
    for i in range(300):
        blocks = [prompt(16, 20 + rng.randrange(4)) for _ in range(rng.randrange(1, 6))]
        h.submit(f"mix{i}", [token for block in blocks for token in block], 4, ignore_eos=True)
        if rng.random() < 0.3:
            h.run_to_end()
    h.run_to_end()
    h.check_outputs()


def test_b18_a_half_filled_block_is_not_shared() -> None:
    h = harness()
    ids = prompt(20)
    twins = [h.submit(f"t{i}", ids, 8, ignore_eos=True) for i in range(2)]
    h.run_to_end()
    third = serve(h, "third", ids + list(twins[0].output_token_ids()[:3]))
    assert third.num_cached_tokens == 16


def test_an_answer_is_found_when_the_conversation_goes_on() -> None:
    h = harness()
    first = serve(h, "first", prompt(20), max_tokens=40)
    history = list(first.token_ids)
    second = serve(h, "second", [*history, 1, 2, 3])
    # 60 tokens, of which the last was never fed: 59 computed, 3 full blocks.
    assert second.num_cached_tokens == 48


@WINDOWS
def test_b19_hits_equal_the_longest_true_common_prefix_in_whole_blocks(window: int) -> None:
    h = harness(window, num_blocks=2048, max_num_seqs=2)
    rng = random.Random(3)
    served: list[list[int]] = []
    for i in range(200):
        base = rng.choice(served)[: rng.randrange(1, 90)] if served and rng.random() < 0.5 else []
        ids = base + [rng.randrange(90) for _ in range(rng.randrange(30, 90))]
        seq = serve(h, f"r{i}", ids, max_tokens=1 + rng.randrange(20))
        common = max((_common(ids, old) for old in served), default=0)
        assert seq.num_cached_tokens == min(common, len(ids) - 1) // 16 * 16
        served.append(list(seq.token_ids)[:-1])


def _common(one: list[int], other: list[int]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


@WINDOWS
def test_b21_switched_off_nothing_is_registered_and_nothing_found(window: int) -> None:
    h = harness(window, caching=False, num_blocks=20)
    rng = random.Random(1)
    for i in range(500):
        seq = h.submit(f"r{i}", prompt(rng.randrange(60, 131), rng.randrange(3)), 3, ignore_eos=True)
        if i % 5 == 0:
            h.run_to_end()
            assert seq.num_cached_tokens == 0
    h.run_to_end()
    h.check_outputs()
    state = h.core.executors[EXECUTOR]
    assert len(state.blocks.free_block_ids) == 20
    assert state.cache.num_hit_tokens == 0


@WINDOWS
def test_equal_prompts_in_flight_are_computed_once(window: int) -> None:
    h = harness(window, max_num_batched_tokens=32)
    ids = prompt(200)
    for i in range(4):
        h.submit(f"r{i}", ids, 5, ignore_eos=True)
    h.run_to_end()
    h.check_outputs()
    computed = sum(sum(plan.num_tokens) for plan in h.plans)
    # 200 once, then 8 prompt tokens each (12 full blocks are shared), and 4 decodes each.
    assert computed == 200 + 3 * (200 - 192) + 4 * 4


def test_who_does_not_follow_is_not_held_up_by_those_who_do() -> None:
    h = harness(1, max_num_batched_tokens=48)
    h.submit("leader", prompt(210), 5, ignore_eos=True)
    h.submit("follower", prompt(210), 5, ignore_eos=True)
    h.submit("other", prompt(10, 40), 2, ignore_eos=True)
    pictures = []
    for _ in range(6):
        h.step()
        pictures.append(h.members())
    # The leader's last chunk leaves 30 tokens: `other` takes 10 of them, the follower waits for the answer.
    assert pictures == [{"leader"}] * 4 + [{"leader", "other"}, {"leader", "other", "follower"}]
    h.run_to_end()
    h.check_outputs()


def test_a_follower_waits_for_what_it_shares_and_not_for_the_rest_of_its_leader() -> None:
    h = harness(2, max_num_batched_tokens=64)
    h.submit("leader", prompt(100), 5, ignore_eos=True)
    follower = h.submit("follower", [*prompt(40), *prompt(60, 50)], 5, ignore_eos=True)
    h.plan()
    h.plan()  # the rest of the leader: it leaves 28 tokens
    assert h.members() == {"leader"}
    h.result()  # of its first 64
    h.plan()
    assert h.members() == {"leader", "follower"}
    assert follower.num_cached_tokens == 32
    h.run_to_end()
    h.check_outputs()


def test_nobody_waits_for_the_work_of_one_who_is_less_important() -> None:
    """Its chunks come after those of everybody more important: a follower would wait for those too."""
    h = harness(1, max_num_batched_tokens=32)
    h.submit("low", prompt(200), 5, priority=5, ignore_eos=True)
    h.step()
    seq = h.submit("high", prompt(200), 5, ignore_eos=True)
    h.plan()
    assert seq.state is State.RUNNING
    assert h.members() == {"high"}
    h.run_to_end()
    h.check_outputs()


@pytest.mark.parametrize("how", ["cancel", "detach", "fail"])
def test_followers_go_on_alone_when_their_leader_is_gone(how: str) -> None:
    h = harness(1, max_num_batched_tokens=32)
    leader = h.submit("leader", prompt(200), 5, ignore_eos=True)
    h.step()
    h.submit("follower", prompt(200), 5, ignore_eos=True)
    h.step()
    if how == "cancel":
        h.core.cancel(leader.request.key, FinishReason.ABORT, h.now)
    elif how == "detach":
        h.core.detach(EXECUTOR, h.now)
        h.attach()
    else:
        h.plan()
        h.result(fail=0)
    if how != "detach":
        del h.sequences["leader"]
    h.run_to_end()
    h.check_outputs()


def test_a_follower_that_is_cancelled_is_not_brought_back() -> None:
    h = harness(1, max_num_batched_tokens=32)
    h.submit("leader", prompt(200), 5, ignore_eos=True)
    h.step()
    follower = h.submit("follower", prompt(200), 5, ignore_eos=True)
    h.step()
    h.core.cancel(follower.request.key, FinishReason.ABORT, h.now)
    del h.sequences["follower"]
    h.run_to_end()
    h.check_outputs()
    assert len(h.core.waiting) == 0


def test_a_failed_row_makes_nothing_known() -> None:
    h = harness(1)
    h.submit("bad", prompt(64), 5, ignore_eos=True)
    h.plan()
    h.result(fail=0)
    del h.sequences["bad"]
    assert serve(h, "again", prompt(64)).num_cached_tokens == 0


@WINDOWS
def test_a_preempted_sequence_finds_what_was_not_taken(window: int) -> None:
    h = harness(window, admission=Admission.OPTIMISTIC, num_blocks=20, max_num_batched_tokens=32)
    h.submit("A", prompt(64, 1), 120, ignore_eos=True)
    seq = h.submit("B", prompt(200, 2), 60, priority=1, ignore_eos=True)  # so B is the victim
    h.run_to_end()
    h.check_outputs()
    assert seq.num_preemptions >= 1
    computed = sum(
        count for plan in h.plans for row, count in zip(plan.rows, plan.num_tokens, strict=True) if row is seq
    )
    assert computed < 200 + 60 + 200  # less than a whole second prefill


def test_a_very_long_prompt_is_hashed_over_several_steps() -> None:
    h = harness(1, num_blocks=4000, max_seq_len=60_000, max_num_batched_tokens=4096)
    ids = [(i * i) % 90 for i in range(30_000)]
    serve(h, "first", ids, max_tokens=2)
    seq = h.submit("second", ids, 2, ignore_eos=True)
    other = h.submit("other", prompt(10), 2, ignore_eos=True)
    h.plan()
    assert seq.state is State.WAITING
    assert h.core.executors[EXECUTOR].is_still_looking
    h.run_to_end()
    h.check_outputs()
    assert seq.num_cached_tokens == 29_984
    assert other.state is State.FINISHED


def test_a_long_prompt_that_is_given_up_while_it_is_hashed_leaves_nothing_to_plan() -> None:
    """Else its executor is asked for a plan again and again, with nothing to put in it."""
    h = harness(1, num_blocks=4000, max_seq_len=60_000, max_num_batched_tokens=4096)
    ids = [(i * i) % 90 for i in range(30_000)]
    serve(h, "first", ids, max_tokens=2)
    seq = h.submit("second", ids, 2, ignore_eos=True)
    h.plan()
    assert h.core.executors[EXECUTOR].is_still_looking
    h.core.cancel(seq.request.key, FinishReason.ABORT, h.now)
    h.plan()
    assert not h.core.executors[EXECUTOR].is_still_looking


def test_hits_are_counted_once_and_honestly() -> None:
    h = harness()
    serve(h, "a", prompt(40))
    serve(h, "b", prompt(40))
    cache = h.core.executors[EXECUTOR].cache
    assert (cache.num_query_tokens, cache.num_hit_tokens) == (80, 32)


def test_b15_other_secrets_give_other_names() -> None:
    names = []
    for secret in (b"one", b"two"):
        h = harness()
        h.core._cache_secret = secret
        h.core.detach(EXECUTOR, 0.0)
        h.attach()
        names.append(serve(h, "r", prompt(40)).block_keys)
    assert len(names[0][0]) == 16
    assert set(names[0]).isdisjoint(names[1])
    assert array("I", prompt(16)) == array("I", prompt(16))

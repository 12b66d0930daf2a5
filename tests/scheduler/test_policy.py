from hypothesis import given
from hypothesis import strategies as st

from scheduler.policy import blocks_to_enter, victim, waiting_key
from scheduler.sequence import Sequence
from tests.scheduler.sequences import running, waiting


def _preempted(prompt_len: int, max_tokens: int, *, won: int = 0) -> Sequence:
    seq = waiting(prompt_len=prompt_len, max_tokens=max_tokens, output=won)
    seq.has_started = True
    seq.num_preemptions = 1
    return seq


# --- who is served first --------------------------------------------------------------------------------


def test_order_is_priority_then_started_then_arrival_then_submission() -> None:
    started = waiting("started", 9, arrival=9.0)
    started.has_started = True
    in_order = [
        waiting("important", 8, priority=-1, arrival=8.0),
        started,
        waiting("early", 7, arrival=1.0),
        waiting("first of two", 5, arrival=2.0),
        waiting("second of two", 6, arrival=2.0),
        waiting("unimportant", 1, priority=1, arrival=0.0),
    ]
    assert sorted([in_order[index] for index in (3, 0, 5, 2, 4, 1)], key=waiting_key) == in_order


# --- who must go ----------------------------------------------------------------------------------------

members = st.lists(
    st.tuples(st.integers(-2, 2), st.integers(0, 5), st.integers(0, 2), st.booleans()), max_size=12
)


@given(members)
def test_the_victim_has_progressed_and_nobody_who_has_is_less_important(
    members: list[tuple[int, int, int, bool]],
) -> None:
    seqs = []
    for order, (priority, arrival, won, is_padding) in enumerate(members):
        seq = running(f"r{order}", order, won=won, priority=priority, arrival=float(arrival))
        seq.is_padding = is_padding
        seqs.append(seq)
    chosen = victim(seqs)
    candidates = [seq for seq in seqs if seq.has_progressed or seq.is_padding]
    if not candidates:
        assert chosen is None
        return
    assert chosen in candidates
    if any(seq.is_padding for seq in candidates):
        assert chosen.is_padding
    else:
        assert all(
            (seq.request.priority, seq.request.arrival, seq.order)
            <= (chosen.request.priority, chosen.request.arrival, chosen.order)
            for seq in candidates
        )


def test_those_who_have_only_just_come_are_spared() -> None:
    assert victim([running("a"), running("b", 2)]) is None
    assert victim([]) is None


# --- who may enter --------------------------------------------------------------------------------------


@given(
    prompt_len=st.integers(1, 100),
    block_size=st.integers(1, 32),
    watermark=st.integers(0, 10),
    others=st.integers(0, 5),
)
def test_a_newcomer_needs_its_whole_context_and_the_watermark(
    prompt_len: int, block_size: int, watermark: int, others: int
) -> None:
    beside = [running(f"o{i}", i) for i in range(others)]
    need = blocks_to_enter(waiting(prompt_len=prompt_len), beside, block_size, watermark)
    assert need == -(-prompt_len // block_size) + watermark


@given(
    prompt_len=st.integers(1, 60),
    won=st.integers(0, 20),
    left=st.integers(1, 40),
    block_size=st.sampled_from([1, 4, 16]),
    others=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 10), st.integers(1, 40)), max_size=5),
)
def test_a_preempted_one_waits_for_room_in_which_all_can_run_as_long_as_its_recompute_is_large(
    prompt_len: int, won: int, left: int, block_size: int, others: list[tuple[int, int, int]]
) -> None:
    seq = _preempted(prompt_len, won + left, won=won)
    beside = []
    for order, (length, has_won, to_come) in enumerate(others):
        blocks = -(-(length + has_won) // block_size)
        beside.append(
            running(
                f"o{order}",
                order,
                won=has_won,
                blocks=blocks,
                prompt_len=length,
                max_tokens=has_won + to_come,
            )
        )
    need = blocks_to_enter(seq, beside, block_size, watermark_blocks=0)
    horizon = len(seq.token_ids)
    held = sum(len(other.block_table) for other in beside)
    everybody = sum(
        -(-min(len(item.token_ids) + horizon, item.max_len - 1) // block_size) for item in [seq, *beside]
    )
    assert need >= -(-len(seq.token_ids) // block_size)  # never less than its context
    assert need >= everybody - held  # nobody is short before it has won as much as it recomputed


def test_with_nobody_beside_it_a_preempted_one_never_needs_more_than_its_full_length() -> None:
    for won in range(1, 20):
        seq = _preempted(10, 20, won=won)
        assert blocks_to_enter(seq, [], 4, watermark_blocks=5) <= -(-seq.max_len // 4)

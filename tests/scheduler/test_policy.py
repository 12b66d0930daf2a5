"""Decisions from counts, held to their laws and to what an exhaustive search would have chosen."""

from collections.abc import Callable, Iterable

from hypothesis import example, given
from hypothesis import strategies as st

from scheduler import policy
from scheduler.forecast import LengthModel
from scheduler.policy import (
    FREE_RECOMPUTE_TOKENS,
    MAX_DISPLACEMENTS,
    MIN_TOKENS_BEFORE_DISPLACEMENT,
    blocks_at_most,
    blocks_expected,
    blocks_to_begin,
    blocks_to_reserve,
    displaced,
    victim,
    worth,
)
from scheduler.sequence import Sequence
from tests.scheduler.sequences import running, waiting

# --- who must go ----------------------------------------------------------------------------------------

Member = tuple[int, int, int, bool, int]
members = st.lists(
    st.tuples(st.integers(-2, 2), st.integers(0, 5), st.integers(0, 2), st.booleans(), st.integers(0, 40)),
    max_size=12,
)


def batch_of(members: list[Member]) -> tuple[list[Sequence], Callable[[Sequence], int]]:
    """Running sequences, and what each would cost to recompute."""
    seqs, costs = [], {}
    for order, (priority, arrival, won, is_padding, cost) in enumerate(members):
        seq = running(f"r{order}", order, won=won, priority=priority, arrival=float(arrival))
        seq.is_padding = is_padding
        seqs.append(seq)
        costs[seq] = cost
    return seqs, costs.__getitem__


@given(members)
def test_the_victim_is_the_cheapest_of_the_least_important_that_got_somewhere(members: list[Member]) -> None:
    seqs, cost = batch_of(members)
    chosen = victim(seqs, cost, lambda _: 1)
    candidates = [seq for seq in seqs if seq.has_progressed or seq.is_padding]
    if chosen is None:
        newcomers = [seq.request.priority for seq in seqs if seq not in candidates]
        assert not candidates or max(newcomers) > max(seq.request.priority for seq in candidates)
        return
    assert chosen in candidates
    if any(seq.is_padding for seq in candidates):
        assert chosen.is_padding
        return
    least = max(seq.request.priority for seq in candidates)
    assert chosen.request.priority == least == max(seq.request.priority for seq in seqs)
    peers = [seq for seq in candidates if seq.request.priority == least]
    assert cost(chosen) == min(map(cost, peers))
    ties = [seq for seq in peers if cost(seq) == cost(chosen)]
    assert chosen is max(ties, key=lambda seq: (seq.request.arrival, seq.order))


@given(members, st.randoms())
def test_the_victim_does_not_depend_on_the_order_in_which_the_running_are_looked_at(
    members: list[Member], rng: object
) -> None:
    seqs, cost = batch_of(members)
    shuffled = list(seqs)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert victim(seqs, cost, lambda _: 1) is victim(shuffled, cost, lambda _: 1)


def test_b06_those_who_have_only_just_come_are_spared() -> None:
    assert victim([running("a"), running("b", 2)], lambda _: 1, lambda _: 1) is None
    assert victim([], lambda _: 1, lambda _: 1) is None
    assert victim([running("a"), running("b", 2, won=1)], lambda _: 1, lambda _: 1) is not None


def test_nobody_goes_while_a_less_important_one_has_only_just_come() -> None:
    best, worst = running("best", 1, won=5, priority=0), running("worst", 2, priority=5)
    assert victim([best, worst], lambda _: 1, lambda _: 1) is None
    assert victim([best, worst], lambda _: 1, {best: 1, worst: 0}.__getitem__) is best, (
        "it would free nothing"
    )
    assert victim([best, running("worst", 2, won=1, priority=5)], lambda _: 1, lambda _: 1) is not best
    pad = running("pad", 3, priority=0)
    pad.is_padding = True
    assert victim([best, worst, pad], lambda _: 1, lambda _: 1) is pad


def test_what_would_be_found_again_costs_nothing_so_its_owner_goes_first() -> None:
    long_but_cached, short = running("a", 1, won=1), running("b", 2, won=1)
    costs = {long_but_cached: 3, short: 20}
    assert victim([short, long_but_cached], costs.__getitem__, lambda _: 1) is long_but_cached


# --- who makes way --------------------------------------------------------------------------------------

Ranked = tuple[int, int, int, int, int]
ranked = st.lists(
    st.tuples(
        st.integers(-1, 3),  # priority
        st.integers(MIN_TOKENS_BEFORE_DISPLACEMENT - 2, MIN_TOKENS_BEFORE_DISPLACEMENT + 2),  # tokens won
        st.integers(MAX_DISPLACEMENTS - 1, MAX_DISPLACEMENTS),  # displaced so often before
        st.integers(0, 4),  # blocks of its own
        st.integers(0, 300),  # tokens to recompute
    ),
    max_size=7,
)


def may_go(seq: Sequence, head: Sequence) -> bool:
    won = len(seq.token_ids) - seq.num_tokens_at_admission
    return (
        seq.request.priority > head.request.priority
        and won >= MIN_TOKENS_BEFORE_DISPLACEMENT
        and seq.num_displacements < MAX_DISPLACEMENTS
    )


@given(ranked, st.integers(-1, 2), st.integers(-1, 3), st.integers(-2, 8), st.integers(0, 900))
def test_b07_displacing_is_all_or_nothing_for_the_strictly_more_important_and_in_proportion(
    ranked: list[Ranked], head_priority: int, num_seats: int, num_blocks: int, most: int
) -> None:
    head = waiting("head", 99, priority=head_priority)
    seqs, blocks, costs = [], {}, {}
    for order, (priority, won, displacements, num_private, cost) in enumerate(ranked):
        seq = running(f"r{order}", order, won=won, priority=priority)
        seq.num_displacements = displacements
        seqs.append(seq)
        blocks[seq], costs[seq] = num_private, cost

    def suffices(group: Iterable[Sequence]) -> bool:
        group = list(group)
        return len(group) >= num_seats and sum(blocks[seq] for seq in group) >= num_blocks

    chosen = displaced(
        head, seqs, suffices=suffices, recompute_tokens=costs.__getitem__, max_recompute_tokens=most
    )

    candidates = [seq for seq in seqs if may_go(seq, head)]
    if suffices([]):
        assert chosen == [], "nobody need go"
        return
    if chosen:
        assert suffices(chosen)
        assert len(set(chosen)) == len(chosen)
        assert all(may_go(seq, head) for seq in chosen)
        for seq in chosen:
            assert not suffices([other for other in chosen if other is not seq]), "one more than needed"
        assert sum(costs[seq] for seq in chosen) <= most
        most_important = min(seq.request.priority for seq in chosen)
        below = [seq for seq in candidates if seq.request.priority > most_important]
        assert not suffices(below), "the least important go first"
        return
    if suffices(candidates):
        # Somebody could have made way: then it was too dear, in the order in which they would have gone.
        assert sum(costs[seq] for seq in candidates) > most


def _displaced_by(head: Sequence, seq: Sequence, cost: int = 0) -> bool:
    chosen = displaced(
        head, [seq], suffices=bool, recompute_tokens=lambda _: cost, max_recompute_tokens=worth(head)
    )
    return chosen == [seq]


def test_b07_equals_never_displace_each_other() -> None:
    seq = running("low", priority=3, won=100)
    assert _displaced_by(waiting("head", priority=2), seq)
    assert not _displaced_by(waiting("head", priority=3), seq)
    assert not _displaced_by(waiting("head", priority=4), seq)


def test_a_newcomer_is_left_alone_until_it_has_won_some_tokens() -> None:
    head = waiting("head", priority=-1)
    assert not _displaced_by(head, running("r", won=MIN_TOKENS_BEFORE_DISPLACEMENT - 1))
    assert _displaced_by(head, running("r", won=MIN_TOKENS_BEFORE_DISPLACEMENT))


def test_who_was_displaced_often_enough_stays_to_its_end() -> None:
    seq = running("r", won=100)
    seq.num_displacements = MAX_DISPLACEMENTS - 1
    assert _displaced_by(waiting("head", priority=-1), seq)
    seq.num_displacements = MAX_DISPLACEMENTS
    assert not _displaced_by(waiting("head", priority=-1), seq)


def test_what_is_thrown_away_is_in_proportion_to_what_is_won() -> None:
    small = waiting("small", priority=-1, prompt_len=10, max_tokens=10)
    large = waiting("large", priority=-1, prompt_len=1000, max_tokens=1000)
    seq = running("r", won=100)
    assert _displaced_by(small, seq, FREE_RECOMPUTE_TOKENS)
    assert not _displaced_by(small, seq, FREE_RECOMPUTE_TOKENS + 1)
    assert _displaced_by(large, seq, 4000)
    assert not _displaced_by(large, seq, 4001)


def test_who_frees_nothing_that_is_wanted_is_spared_although_it_would_be_cheap() -> None:
    useless, useful = running("useless", 1, won=100, priority=5), running("useful", 2, won=100, priority=5)
    costs = {useless: 1, useful: 50}
    chosen = displaced(
        waiting("head", 3),
        [useless, useful],
        suffices=lambda leaving: useful in leaving,
        recompute_tokens=costs.__getitem__,
        max_recompute_tokens=100,
    )
    assert chosen == [useful]


# --- how much room a newcomer must find -----------------------------------------------------------------

Shape = tuple[int, int, int]
shapes = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 12), st.integers(1, 40)), max_size=5)
BLOCK_SIZES = st.sampled_from([1, 4, 16])


def beside(shapes: list[Shape], block_size: int) -> list[Sequence]:
    """Running sequences of (prompt, won, still to come), with the blocks of their contexts."""
    return [
        running(
            f"o{order}",
            order,
            won=won,
            blocks=-(-(length + won) // block_size),
            prompt_len=length,
            max_tokens=won + to_come,
        )
        for order, (length, won, to_come) in enumerate(shapes)
    ]


def preempted(prompt_len: int, won: int, left: int) -> Sequence:
    seq = waiting("p", 99, prompt_len=prompt_len, max_tokens=won + left, output=won)
    seq.has_started = True
    seq.num_preemptions = 1
    return seq


def blocks_of(num_tokens: int, block_size: int) -> int:
    return len({position // block_size for position in range(num_tokens)})


def held_after(seq: Sequence, num_steps: int, block_size: int) -> int:
    """Blocks that a sequence holds when it has won `num_steps` more tokens, or is at its end."""
    return blocks_of(min(len(seq.token_ids) + num_steps, seq.max_len - 1), block_size)


@given(shapes, st.integers(1, 40), st.integers(1, 40), BLOCK_SIZES)
def test_a_reservation_is_what_all_hold_when_each_stands_at_its_limit(
    shapes: list[Shape], prompt_len: int, max_tokens: int, block_size: int
) -> None:
    seq = waiting("head", 99, prompt_len=prompt_len, max_tokens=max_tokens)
    others = beside(shapes, block_size)
    expected = max(
        sum(held_after(member, steps, block_size) for member in [seq, *others]) for steps in (0, 10, 100)
    )
    assert blocks_to_reserve(seq, others, block_size) == expected


@given(shapes, st.integers(1, 100), BLOCK_SIZES)
def test_a_newcomer_may_begin_with_its_context(shapes: list[Shape], prompt_len: int, block_size: int) -> None:
    seq = waiting("head", 99, prompt_len=prompt_len)
    assert blocks_to_begin(seq, beside(shapes, block_size), block_size) == blocks_of(prompt_len, block_size)


@given(shapes, st.integers(1, 60), st.integers(0, 20), st.integers(1, 40), BLOCK_SIZES)
def test_b13_a_preempted_one_begins_when_all_can_run_as_long_as_its_recompute_is_large(
    shapes: list[Shape], prompt_len: int, won: int, left: int, block_size: int
) -> None:
    seq = preempted(prompt_len, won, left)
    others = beside(shapes, block_size)
    horizon = len(seq.token_ids)
    grown = sum(held_after(member, horizon, block_size) for member in [seq, *others])
    held = sum(len(other.block_table) for other in others)
    assert blocks_to_begin(seq, others, block_size) == max(
        grown - held, blocks_of(len(seq.token_ids), block_size)
    )


def simulated_peak(members: list[tuple[int, int]], block_size: int) -> int:
    """Largest number of blocks at any step, when each wins one token a step and leaves with its last."""
    longest = max((remaining for _, remaining in members), default=0)
    return max(
        sum(
            blocks_of(num_tokens + step, block_size) for num_tokens, remaining in members if step <= remaining
        )
        for step in range(longest + 1)
    )


@given(shapes, st.integers(1, 40), st.integers(1, 40))
def test_the_expected_need_without_experience_is_the_peak_of_running_to_the_limits(
    shapes: list[Shape], prompt_len: int, max_tokens: int
) -> None:
    seq = waiting("head", 99, prompt_len=prompt_len, max_tokens=max_tokens)
    others = beside(shapes, 1)
    members = [(len(item.token_ids), item.max_len - len(item.token_ids)) for item in [seq, *others]]
    assert blocks_expected(seq, others, 1, LengthModel()) == simulated_peak(members, 1)


@given(shapes, st.integers(1, 40), st.integers(1, 40), st.integers(1, 60), st.sampled_from([1, 4, 16]))
def test_no_forecast_exceeds_growing_to_the_limits(
    shapes: list[Shape], prompt_len: int, max_tokens: int, usual_length: int, block_size: int
) -> None:
    lengths = LengthModel()
    for _ in range(50):
        lengths.observe(usual_length)
    others = beside(shapes, block_size)
    for seq in (
        waiting("head", 99, prompt_len=prompt_len, max_tokens=max_tokens),
        preempted(prompt_len, 3, max_tokens),
    ):
        at_most = blocks_at_most(seq, others, block_size)
        assert blocks_expected(seq, others, block_size, lengths) <= at_most


@given(shapes, st.integers(1, 60), st.integers(1, 20), st.integers(1, 40), st.integers(1, 30))
def test_b13_for_a_preempted_one_everybody_is_taken_to_grow_by_its_recompute_at_least(
    shapes: list[Shape], prompt_len: int, won: int, left: int, usual_length: int
) -> None:
    lengths = LengthModel()
    for _ in range(50):
        lengths.observe(usual_length)
    seq = preempted(prompt_len, won, left)
    others = beside(shapes, 1)
    horizon = len(seq.token_ids)
    members = [
        (len(item.token_ids), min(horizon, item.max_len - len(item.token_ids))) for item in [seq, *others]
    ]
    assert blocks_expected(seq, others, 1, lengths) >= simulated_peak(members, 1)


@given(shapes, st.integers(1, 40), BLOCK_SIZES, st.integers(1, 30))
def test_more_company_never_makes_the_need_smaller(
    shapes: list[Shape], prompt_len: int, block_size: int, usual_length: int
) -> None:
    lengths = LengthModel()
    for _ in range(50):
        lengths.observe(usual_length)
    seq = waiting("head", 99, prompt_len=prompt_len)
    others = beside(shapes, block_size)
    for fewer in ([*others[:i], *others[i + 1 :]] for i in range(len(others))):
        assert blocks_expected(seq, fewer, block_size, lengths) <= blocks_expected(
            seq, others, block_size, lengths
        )
        assert blocks_to_reserve(seq, fewer, block_size) <= blocks_to_reserve(seq, others, block_size)


def test_who_would_free_nothing_is_spared_while_anybody_frees_some() -> None:
    shares, owns = running("shares", won=1), running("owns", 2, won=1)
    freed = {shares: 0, owns: 2}
    assert victim([shares, owns], lambda seq: 50 * freed[seq], freed.__getitem__) is owns
    assert victim([shares], lambda _: 0, freed.__getitem__) is shares, "then the next one is its only holder"


# --- spreading what many need at once -------------------------------------------------------------------


@given(num_running=st.integers(1, 8192), num_free=st.integers(0, 100_000), block_size=st.integers(1, 64))
@example(num_running=127, num_free=100_000, block_size=16)
@example(num_running=128, num_free=256, block_size=16)
@example(num_running=512, num_free=1023, block_size=16)
@example(num_running=512, num_free=4096, block_size=1)
def test_growth_is_handed_out_early_only_where_there_is_room_and_all_have_it_in_time(
    num_running: int, num_free: int, block_size: int
) -> None:
    count, num_tokens = policy.early_growth(num_running, num_free, block_size)
    assert 0 <= num_tokens <= block_size // 2
    assert count * num_tokens >= num_running or not num_tokens
    assert count <= num_free
    if num_running < 128 or num_free < 2 * num_running:
        assert (count, num_tokens) == (0, 0)
    elif block_size > 1:
        assert num_tokens > 0


@given(num_running=st.integers(1, 8192), block_size=st.integers(1, 64))
def test_names_are_made_faster_than_blocks_fill(num_running: int, block_size: int) -> None:
    assert policy.num_named_at_once(num_running, block_size) * block_size > num_running

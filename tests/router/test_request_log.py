"""The log of one request: ids once, ends once, text from ids alone."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.latencies import Latencies
from router.request_log import (
    Delta,
    End,
    FinishReason,
    OverrunError,
    RequestLog,
    SamplingParams,
    TokenLogprobs,
    choice_key,
    choice_seed,
    drawn_seed,
)
from router.stop_strings import StopStrings
from router.text_stream import TextStream

EOS = 257


class Letters:
    """A detokenizer whose ids are code points."""

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join(map(chr, token_ids))

    def flush(self) -> str:
        return ""


def sampling(**changes: object) -> SamplingParams:
    values: dict[str, object] = {
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 7, "max_tokens": 100,
        "min_tokens": 0, "ignore_eos": False, "stop_token_ids": (), "logprobs": None,
    }  # fmt: skip
    return SamplingParams(**(values | changes))  # type: ignore[arg-type]


def new_log(
    *stops: str,
    n: int = 1,
    include: bool = False,
    deadline: float | None = None,
    latencies: Latencies | None = None,
    **changes: object,
) -> RequestLog:
    return RequestLog(
        request_id="r",
        tenant="",
        prompt_token_ids=(1, 2, 3),
        sampling=sampling(**changes),
        texts=[TextStream(Letters(), StopStrings(stops, include=include)) for _ in range(n)],
        eos_token_ids=frozenset({EOS}),
        priority=0,
        cache_salt="",
        body_digest=b"d",
        deadline=deadline,
        received_at=10.0,
        latencies=latencies,
    )


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def logprob(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -1.0, 1, (), ())


def test_a_delta_holds_everything_since_the_last_one_was_taken() -> None:
    choice = new_log().choices[0]
    choice.append(ids("ab"), (), 11.0)
    choice.append(ids("c"), (), 12.0)
    assert choice.take_delta() == Delta(0, 0, "abc", tuple(ids("abc")), ())
    choice.append(ids("d"), (), 13.0)
    assert choice.take_delta() == Delta(0, 3, "d", tuple(ids("d")), ())
    assert choice.take_delta() is None
    assert choice.first_token_at == 11.0


def test_log_probabilities_that_the_client_has_not_taken_are_counted_with_their_alternatives() -> None:
    log = new_log(n=2, logprobs=4)
    assert log.num_unread_numbers == 0
    log.choices[0].append(ids("ab"), [logprob(id_) for id_ in ids("ab")], 11.0)
    log.choices[1].append(ids("c"), [logprob(id_) for id_ in ids("c")], 11.0)
    assert log.num_unread_numbers == 3 * (1 + 4)
    log.choices[0].take_delta()
    assert log.num_unread_numbers == 1 + 4
    unasked = new_log()
    unasked.choices[0].append(ids("ab"), (), 11.0)
    assert unasked.num_unread_numbers == 0


def test_b41_text_that_may_become_a_stop_string_is_held_and_ids_go_on() -> None:
    choice = new_log("xyz").choices[0]
    choice.append(ids("ax"), (), 11.0)
    assert choice.take_delta() == Delta(0, 0, "a", tuple(ids("ax")), ())
    choice.append(ids("b"), (), 11.0)
    assert choice.take_delta() == Delta(0, 2, "xb", tuple(ids("b")), ())


def test_b44_a_stop_string_ends_the_choice_and_later_ids_of_the_message_are_dropped() -> None:
    choice = new_log("b").choices[0]
    choice.append(ids("abc"), [logprob(t) for t in ids("abc")], 11.0)
    assert choice.end == End(FinishReason.STOP, matched_stop="b")
    assert choice.ended_at == 11.0
    assert choice.output_token_ids == ids("ab")
    assert choice.take_delta() == Delta(0, 0, "a", tuple(ids("ab")), (logprob(ord("a")), logprob(ord("b"))))


def test_held_text_comes_out_when_the_choice_runs_to_its_length() -> None:
    choice = new_log("xyz").choices[0]
    choice.append(ids("ax"), (), 11.0)
    choice.take_delta()
    choice.finish(End(FinishReason.LENGTH), 12.0)
    assert choice.take_delta() == Delta(0, 2, "x", (), ())


def test_held_text_stays_back_when_the_choice_breaks_off() -> None:
    choice = new_log("xyz").choices[0]
    choice.append(ids("ax"), (), 11.0)
    choice.take_delta()
    choice.finish(End(FinishReason.ERROR, status_code=14), 12.0)
    assert choice.take_delta() is None


@pytest.mark.parametrize(("token_id", "changes"), [(EOS, {}), (ord("q"), {"stop_token_ids": (ord("q"),)})])
def test_b118_a_token_that_ends_the_choice_counts_and_does_not_show(
    token_id: int, changes: dict[str, object]
) -> None:
    choice = new_log(**changes).choices[0]
    choice.append([ord("a"), token_id], (), 11.0)
    choice.finish(End(FinishReason.STOP, matched_token_id=token_id), 11.0)
    assert choice.take_delta() == Delta(0, 0, "a", (ord("a"), token_id), ())


def test_with_ignore_eos_an_end_token_is_text_like_any_other() -> None:
    choice = new_log(ignore_eos=True).choices[0]
    choice.append([EOS], (), 11.0)
    assert choice.take_delta() == Delta(0, 0, chr(EOS), (EOS,), ())


def test_a_choice_ends_once() -> None:
    choice = new_log().choices[0]
    choice.finish(End(FinishReason.LENGTH), 11.0)
    with pytest.raises(AssertionError):
        choice.finish(End(FinishReason.STOP), 12.0)
    with pytest.raises(AssertionError):
        choice.append([1], (), 12.0)


def test_only_the_first_start_counts() -> None:
    log = new_log(n=2)
    assert log.num_cached_tokens is None
    log.choices[1].start(16)
    log.choices[1].start(48)
    assert log.num_cached_tokens == 16


def test_b83_what_is_left_of_the_deadline_is_never_negative() -> None:
    log = new_log(deadline=12.5)
    assert log.remaining_ms(11.0) == 1500
    assert log.remaining_ms(13.0) == 0
    assert new_log().remaining_ms(11.0) is None


def test_waiting_counts_from_the_first_submission() -> None:
    log = new_log()
    assert log.waited_ms(11.0) == 0
    log.submitted_at = 11.0
    assert log.waited_ms(13.5) == 2500


def test_b62_choices_have_seeds_of_their_own_that_do_not_depend_on_n() -> None:
    one, four = new_log(n=1, seed=1), new_log(n=4, seed=1)
    seeds = [choice.sampling.seed for choice in four.choices]
    assert one.choices[0].sampling.seed == seeds[0] == 1
    assert len(set(seeds)) == 4
    assert seeds == [choice.sampling.seed for choice in new_log(n=4, seed=1).choices]


def test_choice_seeds_are_those_of_splitmix64() -> None:
    # The first outputs of the reference implementation started at 1234567.
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423 - (1 << 64)]
    assert [choice_seed(1234567, index) for index in (1, 2, 3)] == outputs


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 15))
def test_b61_every_64_bit_seed_gives_64_bit_seeds(seed: int, index: int) -> None:
    assert -(1 << 63) <= choice_seed(seed, index) < 1 << 63


def test_keys_tell_tenant_request_and_choice_apart() -> None:
    keys = {
        choice_key(*name) for name in [("", "a", 0), ("", "a", 1), ("a", "", 0), ("", "b", 0), ("t", "a", 0)]
    }
    assert len(keys) == 5
    assert {len(key) for key in keys} == {16}


@given(st.text("abx", max_size=30), st.lists(st.integers(1, 4), max_size=30), st.booleans())
def test_b52_text_and_ids_do_not_depend_on_how_messages_or_deltas_are_cut(
    text: str, cuts: list[int], take_often: bool
) -> None:
    def run(pieces: list[str]) -> tuple[str, list[int], End | None]:
        choice = new_log("ab", "xx").choices[0]
        out: list[Delta | None] = []
        for piece in pieces:
            if choice.end is None:
                choice.append(ids(piece), (), 11.0)
                if take_often:
                    out.append(choice.take_delta())
        if choice.end is None:
            choice.finish(End(FinishReason.LENGTH), 12.0)
        out.append(choice.take_delta())
        deltas = [delta for delta in out if delta is not None]
        position = 0
        for delta in deltas:
            assert delta.offset == position
            position += len(delta.token_ids)
        return "".join(d.text for d in deltas), [t for d in deltas for t in d.token_ids], choice.end

    pieces, rest = [], text
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    assert run([*pieces, rest]) == run([text])


def test_b106_held_text_comes_with_the_id_that_ends_the_choice() -> None:
    """Else a client that has all ids could not know whether it has all of the text."""
    choice = new_log("xyz", max_tokens=2).choices[0]
    choice.append(ids("ax"), (), 11.0)
    assert choice.take_delta() == Delta(0, 0, "ax", tuple(ids("ax")), ())
    choice.finish(End(FinishReason.LENGTH), 12.0)
    assert choice.take_delta() is None
    stopped = new_log("xyz").choices[0]
    stopped.append([*ids("ax"), EOS], (), 11.0)
    assert stopped.take_delta() == Delta(0, 0, "ax", (*ids("ax"), EOS), ())


@given(st.text("abx", max_size=20), st.integers(0, 20), st.integers(1, 25))
def test_b106_a_resumed_choice_goes_on_with_text_and_ids_exactly(
    text: str, cut: int, max_tokens: int
) -> None:
    whole = new_log("ab", "xx", max_tokens=max_tokens).choices[0]
    whole.append(ids(text)[:max_tokens], (), 11.0)
    token_ids = list(whole.output_token_ids)
    received = token_ids[: min(cut, len(token_ids))]
    before = new_log("ab", "xx", max_tokens=max_tokens).choices[0]
    before.append(received, (), 11.0)
    had = before.take_delta()
    resumed = new_log("ab", "xx", max_tokens=max_tokens).choices[0]
    resumed.resume(received, 11.0)
    assert resumed.take_delta() is None
    if resumed.end is None:
        resumed.append(token_ids[len(received) :], (), 12.0)
    for choice in (whole, resumed):
        if choice.end is None:
            choice.finish(End(FinishReason.LENGTH), 13.0)
    delta, more = whole.take_delta(), resumed.take_delta()
    assert (had.text if had else "") + (more.text if more else "") == (delta.text if delta else "")
    assert resumed.output_token_ids == token_ids
    assert resumed.end == whole.end
    assert more is None or more.offset == len(received)


@pytest.mark.parametrize("received", [[EOS, 97], [97, 98, 97], [97] * 4])
def test_ids_behind_an_end_cannot_be_resumed_from(received: list[int]) -> None:
    choice = new_log("ab", max_tokens=3).choices[0]
    with pytest.raises(OverrunError) as raised:
        choice.resume(received, 11.0)
    assert raised.value.position == {2: 1, 3: 2, 4: 3}[len(received)]


def test_an_end_token_ends_a_resumed_choice_also_before_the_least_that_was_asked_for() -> None:
    """As at the executor, which masks end tokens until then, unless a constraint leaves nothing else."""
    choice = new_log("ab", max_tokens=9, min_tokens=5).choices[0]
    with pytest.raises(OverrunError) as raised:
        choice.resume([7, EOS, 7], 11.0)
    assert raised.value.position == 2


def test_a_drawn_seed_is_of_the_request_alone() -> None:
    seeds = {
        drawn_seed(*named) for named in [("", "a", b"d"), ("", "b", b"d"), ("", "a", b"e"), ("t", "a", b"d")]
    }
    assert len(seeds) == 4
    assert all(-(1 << 63) <= seed < 1 << 63 for seed in seeds)
    assert drawn_seed("", "a", b"d") in seeds


def test_b111_ids_that_a_client_has_already_are_no_latencies() -> None:
    latencies = Latencies()
    (choice,) = new_log(latencies=latencies).choices
    choice.resume([97, 98, 99], 11.0)
    assert latencies == Latencies()
    choice.append([100, 101], (), 11.5)
    assert (latencies.num_tokens, sum(latencies.time_to_first_token.counts)) == (2, 1)
    assert latencies.time_to_first_token.total == pytest.approx(0.5), "since it was resumed"


def test_ids_behind_a_stop_string_are_wasted_and_no_output() -> None:
    latencies = Latencies()
    (choice,) = new_log("cd", latencies=latencies).choices
    choice.append([ord(letter) for letter in "abcdef"], (), 11.0)
    assert choice.end is not None
    assert (latencies.num_tokens, latencies.num_wasted_tokens) == (len(choice.output_token_ids), 2) == (4, 2)
    assert sum(latencies.inter_token.counts) == 3

import random
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.lab.loads import (
    Load,
    LoadError,
    Row,
    fresh_prompt,
    gaps,
    hashed_prompt,
    lengths,
    read_trace,
    tenants,
)

DATA = Path(__file__).parents[3] / "bench" / "data"
HEAD = "arrival_s,prompt_tokens,output_tokens\n"


def written(tmp_path: Path, text: str, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_the_traces_at_hand_are_read_whole() -> None:
    azure = read_trace(DATA / "azure2023_conv.csv")
    assert len(azure) == 13_000
    assert azure[1] == Row(4.314579, 396, 109)
    mooncake = read_trace(DATA / "mooncake_conversation.jsonl")
    assert len(mooncake) == 8_000
    assert mooncake[0].hash_ids[:3] == (0, 1, 2)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("arrival_s,prompt_tokens\n1,2\n", "line 1: the column output_tokens is missing"),
        (HEAD, "holds no requests"),
        ("", "line 1: the column arrival_s is missing"),
        (HEAD + "0,5,5\n1,x,5\n", "line 3: prompt_tokens is 'x', a whole number from 1 to"),
        (HEAD + "0,0,5\n", "line 2: prompt_tokens is '0'"),
        (HEAD + "0,5,-1\n", "line 2: output_tokens is '-1'"),
        (HEAD + "0,5\n", "line 2: output_tokens is None"),
        (HEAD + "0,5,1.5\n", r"line 2: output_tokens is '1\.5'"),
        (HEAD + "-1,5,5\n", "line 2: arrival_s is '-1', a number of seconds >= 0 is wanted"),
        (HEAD + "nan,5,5\n", "line 2: arrival_s is 'nan'"),
        (HEAD + "inf,5,5\n", "line 2: arrival_s is 'inf'"),
        (HEAD + "soon,5,5\n", "line 2: arrival_s is 'soon'"),
        (HEAD + "2,5,5\n1,5,5\n", "line 3: arrival_s is 1, before the 2 of the line above"),
    ],
)
def test_a_malformed_csv_is_refused_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(LoadError, match=complaint):
        read_trace(written(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 5}\n{', "line 2: Expecting"),
        ("[1]", "line 1: an object is wanted"),
        ('{"arrival_s": 0, "prompt_tokens": 5.5, "output_tokens": 5}', r"line 1: prompt_tokens is 5\.5"),
        ('{"arrival_s": 0, "prompt_tokens": true, "output_tokens": 5}', "line 1: prompt_tokens is True"),
        (
            '{"arrival_s": 1' + "0" * 400 + ', "prompt_tokens": 5, "output_tokens": 5}',
            "line 1: arrival_s is 1000",
        ),
        ("[" * 100_000, "line 1: "),
        ('{"arrival_s": 0, "output_tokens": 5}', "line 1: prompt_tokens is None"),
        ('{"arrival_s": [], "prompt_tokens": 5, "output_tokens": 5}', r"line 1: arrival_s is \[\]"),
        (
            '{"arrival_s": 0, "prompt_tokens": 513, "output_tokens": 5, "hash_ids": [1]}',
            "line 1: 1 hash_ids stand for 512 tokens, the prompt has 513",
        ),
        (
            '{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 5, "hash_ids": [-1]}',
            "line 1: hash_ids must be",
        ),
        (
            '{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 5, "hash_ids": 7}',
            "hash_ids must be a list",
        ),
    ],
)
def test_malformed_json_lines_are_refused_with_their_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(LoadError, match=complaint):
        read_trace(written(tmp_path, text, "trace.jsonl"))


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=200))
def test_no_text_is_read_with_anything_but_rows_or_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    for name in ("trace.csv", "trace.jsonl"):
        path = tmp_path_factory.getbasetemp() / name
        path.write_text(HEAD + text if name.endswith("csv") else text, errors="replace")
        try:
            assert read_trace(path)
        except LoadError as error:
            assert str(path) in str(error)  # noqa: PT017 - either is right


def test_a_file_that_is_no_text_or_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    with pytest.raises(LoadError, match="cannot be read"):
        read_trace(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LoadError, match="cannot be read"):
        read_trace(path)


def test_lengths_keep_their_bounds_and_means() -> None:
    rng = random.Random(1)
    assert {lengths("128")(rng) for _ in range(5)} == {128}
    uniform = [lengths("uniform:32,512")(rng) for _ in range(5000)]
    assert min(uniform) == 32
    assert max(uniform) == 512
    assert statistics.fmean(uniform) == pytest.approx(272, rel=0.03)
    exponential = [lengths("exponential:161")(rng) for _ in range(5000)]
    assert min(exponential) >= 1
    assert statistics.fmean(exponential) == pytest.approx(161, rel=0.05)


@pytest.mark.parametrize(
    "text",
    ["", "x", "0", "-3", "1.5", "uniform:9,3", "uniform:1", "exponential:0", "exponential:nan", "zipf:2"],
)
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(LoadError, match="is no length"):
        lengths(text)


@pytest.mark.parametrize(
    ("text", "variation"), [("even", 0.0), ("poisson", 1.0), ("gamma:0.5", 0.5), ("gamma:3", 3.0)]
)
def test_gaps_have_their_rate_and_variation(text: str, variation: float) -> None:
    rng = random.Random(1)
    draw = gaps(text, 4.0)
    values = [draw(rng) for _ in range(20_000)]
    assert statistics.fmean(values) == pytest.approx(0.25, rel=0.06)
    assert statistics.pstdev(values) / statistics.fmean(values) == pytest.approx(variation, abs=0.1)


@pytest.mark.parametrize("text", ["", "sometimes", "gamma", "gamma:0", "gamma:x", "gamma:nan", "gamma:1e9"])
def test_other_arrivals_are_refused(text: str) -> None:
    with pytest.raises(LoadError, match="is no arrivals"):
        gaps(text, 1.0)


ROWS = (Row(0.0, 5, 2), Row(1.0, 6, 3), Row(4.0, 7, 4))


def times(load: Load) -> Sequence[float]:
    return [arrival.time for arrival in load]


def test_a_trace_goes_round_again_after_a_mean_gap() -> None:
    load = Load(7, rows=ROWS, arrivals="trace")
    assert times(load) == [0, 1, 4, 6, 7, 10, 12]
    assert [len(item.prompt_token_ids) for item in load] == [5, 6, 7, 5, 6, 7, 5]
    assert [item.max_tokens for item in load] == [2, 3, 4, 2, 3, 4, 2]


def test_a_rate_stretches_the_rhythm() -> None:
    stretched = times(Load(7, rows=ROWS, arrivals="trace", rate=1.0))
    assert stretched == [0, 0.5, 2, 3, 3.5, 5, 6]


@pytest.mark.parametrize("start", [0, 2054.5, 1_700_000_000])
def test_a_cut_from_the_middle_of_a_trace_begins_at_zero(tmp_path: Path, start: float) -> None:
    lines = "".join(f"{start + row.time},5,5\n" for row in ROWS if row.time is not None)
    rows = tuple(read_trace(written(tmp_path, HEAD + lines)))
    assert times(Load(7, rows=rows, arrivals="trace")) == [0, 1, 4, 6, 7, 10, 12]
    assert times(Load(7, rows=rows, arrivals="trace", rate=1.0)) == [0, 0.5, 2, 3, 3.5, 5, 6]


def test_a_trace_that_goes_round_again_finds_nothing_of_the_time_before() -> None:
    rows = (Row(0.0, 600, 1, (0, 1)), Row(1.0, 600, 1, (0, 2)), Row(2.0, 600, 1, (3, 4)))
    prompts = [item.prompt_token_ids for item in Load(30, rows=rows, arrivals="trace")]
    assert len({prompt[0] for prompt in prompts}) == 20  # the first two of each time begin alike
    for first in range(0, 30, 3):
        assert prompts[first][:512] == prompts[first + 1][:512]
    with pytest.raises(LoadError, match=r"go 3 times through the trace, .* more than the 8388608 that there"):
        Load(3, rows=(Row(0.0, 5, 1, (4_000_000,)),), arrivals="at-once")


def test_a_byte_order_mark_is_no_part_of_a_column(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, "\ufeff" + HEAD + "0,5,5\n")) == [Row(0.0, 5, 5)]


def test_a_load_is_the_same_each_time_and_another_with_another_seed() -> None:
    def drawn(seed: int) -> list[tuple[float, int, int]]:
        load = Load(50, prompt="uniform:1,90", output="exponential:9", rate=2.0, seed=seed)
        return [(item.time, len(item.prompt_token_ids), item.num_output_tokens) for item in load]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert all(before[0] <= after[0] for before, after in pairwise(drawn(1)))


def test_lengths_do_not_change_with_the_rate() -> None:
    slow, fast = (Load(20, prompt="uniform:1,90", output="9", rate=rate) for rate in (1.0, 5.0))
    assert [len(item.prompt_token_ids) for item in slow] == [len(item.prompt_token_ids) for item in fast]
    assert times(slow) == pytest.approx([5 * time for time in times(fast)])


@pytest.mark.parametrize(
    ("load", "complaint"),
    [
        ({"num_requests": 0, "prompt": "1", "output": "1", "rate": 1.0}, "0 requests are no load"),
        ({"num_requests": 1, "prompt": "1", "output": "1"}, "arrivals 'poisson' need a rate"),
        ({"num_requests": 1, "prompt": "1", "output": "1", "rate": -1.0}, "the rate is -1 requests a second"),
        ({"num_requests": 1, "prompt": "1", "output": "1", "rate": float("nan")}, "the rate is nan"),
        ({"num_requests": 1, "prompt": "1", "output": "x", "rate": 1.0}, "'x' is no length"),
        ({"num_requests": 1, "prompt": "1", "output": "1", "arrivals": "trace"}, "need a trace"),
        ({"num_requests": 1, "rows": (Row(None, 1, 1),), "arrivals": "trace"}, "tells no arrival times"),
        ({"num_requests": 1, "rows": (Row(0.0, 1, 1),), "arrivals": "trace"}, "come all at once"),
        ({"num_requests": 1, "rows": ROWS, "arrivals": "trace", "max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_a_load_that_cannot_be_is_refused(load: dict[str, object], complaint: str) -> None:
    with pytest.raises(LoadError, match=complaint):
        Load(**load)  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.integers(0, 1 << 33), st.integers(0, 1 << 33), st.integers(1, 20_000))
def test_fresh_prompts_share_no_first_token(one: int, other: int, length: int) -> None:
    assert len(fresh_prompt(one, length)) == length
    if one % (1 << 32) != other % (1 << 32):
        assert fresh_prompt(one, length)[0] != fresh_prompt(other, length)[0]


def test_hashed_prompts_begin_alike_as_far_as_their_ids() -> None:
    one, other = hashed_prompt(Row(0, 1500, 1, (3, 4, 5))), hashed_prompt(Row(0, 1536, 1, (3, 4, 9)))
    assert len(one) == 1500
    assert one[:1024] == other[:1024]
    assert one[1024] != other[1024]
    assert len(hashed_prompt(Row(0, 1500, 1, (3, 4, 5)), tokens_per_id=16)) == 1500 // 32


def test_tenants_come_as_often_as_their_shares_say() -> None:
    load = Load(4000, prompt="5", output="5", arrivals="at-once", tenants=tenants("a:1,b:3"))
    names = [item.tenant for item in load]
    assert names == [item.tenant for item in load]
    assert 0.22 < names.count("a") / len(names) < 0.28
    for text in ("", ":2", "a:x", "a:-1", "a:inf"):
        with pytest.raises(LoadError, match="is no tenant"):
            tenants(text)

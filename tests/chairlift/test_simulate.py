import json
from pathlib import Path

import pytest

from chairlift import capacity, simulate
from chairlift.lab import pictures
from tests.chairlift.gone import NobodyReads

SMALL = ["--preset", "opt-13b-a100-40", "--prompt", "uniform:10,50", "--output", "20", "--requests", "20"]


def test_schemes_side_by_side_as_a_table_and_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    schemes = ["--scheme", "chairlift", "--scheme", "orca-max", "--max-seq-len", "2048"]
    assert simulate.main([*SMALL, "--rate", "5", *schemes, "--json", str(path)]) == 0
    table = capsys.readouterr().out
    assert "20 requests, 400 output tokens" in table
    assert "orca-max" in table
    assert "first token p99" in table
    figures = json.loads(path.read_text())
    assert [item["scheme"] for item in figures] == ["chairlift", "orca-max"]
    assert all(item["output_tokens"] == 400 for item in figures)


def test_the_same_seed_gives_the_same_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in (1, 1, 2):
        path = tmp_path / "out.json"
        args = [*SMALL, "--rate", "5", "--seed", str(seed), "--json", str(path), "--quiet"]
        assert simulate.main(args) == 0
        texts.append(path.read_text())
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    assert not capsys.readouterr().out


def test_one_token_each_has_nothing_between_tokens_and_json_knows_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    args = ["--preset", "opt-13b-a100-40", "--prompt", "5", "--output", "1", "--requests", "2"]
    assert simulate.main([*args, "--arrivals", "at-once", "--json", str(path)]) == 0
    assert json.loads(path.read_text())[0]["between_tokens_p50"] is None


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_a_load_that_nobody_takes_is_no_success(quiet: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--preset", "opt-13b-a100-40", "--prompt", "5000", "--output", "5", "--requests", "3"]
    assert simulate.main([*args, "--arrivals", "at-once", "--max-seq-len", "2048", *quiet]) == 1
    out, err = capsys.readouterr()
    assert err == (
        "chairlift simulate: chairlift refused every request: one has room for 2,048 tokens, "
        "prompt and output (--max-seq-len, --num-blocks)\n"
    )
    assert "nan" not in out


def test_where_all_are_refused_there_is_a_picture_of_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--preset", "opt-13b-a100-40", "--prompt", "5000", "--output", "5", "--requests", "3"]
    picture = tmp_path / "out.png"
    flags = ["--arrivals", "at-once", "--max-seq-len", "2048", "--png", str(picture)]
    assert simulate.main([*args, *flags]) == 1
    assert "refused every request" in capsys.readouterr().err
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", ["simulate", "capacity"])
def test_a_reader_that_has_gone_is_no_fault_of_the_load(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    monkeypatch.setattr("sys.stdout", NobodyReads())
    args = ["--rate", "5"] if command == "simulate" else ["--first-token-p99", "0.05"]
    with pytest.raises(BrokenPipeError):
        {"simulate": simulate, "capacity": capacity}[command].main([*SMALL, *args, "--json", str(path)])
    assert json.loads(path.read_text())  # what was found is not lost


def test_two_plans_under_way_are_late_as_in_the_server(tmp_path: Path) -> None:
    """A second plan that leaves as soon as it can makes newcomers wait for two steps."""
    prices, path = tmp_path / "prices.json", tmp_path / "out.json"
    prices.write_text('{"base_us": 12000, "per_token_us": 60}')
    load = ["--prompt", "uniform:20,400", "--output", "uniform:20,200", "--rate", "2", "--requests", "100"]
    args = ["--step-times", str(prices), "--num-blocks", "2048", "--max-num-batched-tokens", "256", *load]

    def first_token_p50(*flags: str) -> float:
        assert simulate.main([*args, *flags, "--json", str(path), "--quiet"]) == 0
        return float(json.loads(path.read_text())[0]["first_token_p50"])

    one, two, early = (first_token_p50(*flags) for flags in (
        (), ("--window", "2"), ("--window", "2", "--no-late-plans")))  # fmt: skip
    assert two == pytest.approx(one, rel=0.1)
    assert early > 1.2 * two


def test_a_trace_its_rhythm_and_prices_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, prices = tmp_path / "trace.jsonl", tmp_path / "prices.json"
    row = {"prompt_tokens": 600, "output_tokens": 5, "hash_ids": [1, 2]}
    trace.write_text("\n".join(json.dumps(row | {"arrival_s": at}) for at in range(3)))
    prices.write_text('{"base_us": 1000, "per_token_us": 10}')
    args = ["--trace", str(trace), "--step-times", str(prices), "--requests", "6"]
    assert simulate.main(args) == 2
    assert "--step-times says nothing of memory: --num-blocks is wanted" in capsys.readouterr().err
    assert simulate.main([*args, "--num-blocks", "100", "--executors", "2"]) == 0
    # The first of each time round computes all it has; the two after it find 37 blocks of 16 of 600 tokens.
    assert f"{100 * 4 * 592 / 3600:.1f} %" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--preset", "gpt5", "--prompt", "5", "--output", "5", "--rate", "1"], "no preset is named 'gpt5'"),
        (["--preset", "opt-13b-a100-40", "--prompt", "5"], "either --trace or both --prompt and --output"),
        ([*SMALL, "--rate", "0"], "the rate is 0 requests a second"),
        ([*SMALL], "arrivals 'poisson' need a rate: --rate, requests a second"),
        ([*SMALL, "--preset", "nope"], "no preset is named 'nope'"),  # before what else is wrong
        (["--step-times", "nope.json"], "from nope.json: No such file or directory (`chairlift calibrate`"),
        (
            ["--preset", "opt-13b-a100-40", "--trace", "nope.csv"],
            "nope.csv cannot be read: No such file or dir",
        ),
        ([*SMALL, "--rate", "1", "--max-num-seqs", "0"], "--max-num-seqs is 0: it must be at least 1"),
        ([*SMALL, "--rate", "1", "--executors", "1000"], "--executors is 1000: at most 64"),
        (
            [*SMALL, "--rate", "1", "--num-blocks", "99999999999"],
            "--num-blocks is 99999999999: at most 16777216",
        ),
        ([*SMALL, "--rate", "1", "--png", "p.xyz"], "p.xyz is no picture by its name: "),
        ([*SMALL, "--rate", "1", "--arrivals", "at-once"], "come all at once have no rate"),
        ([*SMALL, "--rates", "1,2", "--arrivals", "at-once"], "come all at once have no rate"),
    ],
)
def test_bad_flags_are_refused_in_a_sentence(
    args: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate.main(args) == 2
    assert complaint in capsys.readouterr().err


def test_a_malformed_trace_is_refused_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,5,5\n-3,5,5\n")
    assert simulate.main(["--preset", "opt-13b-a100-40", "--trace", str(trace)]) == 2
    assert f"{trace}, line 3: arrival_s is '-3'" in capsys.readouterr().err


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    schemes = ["--scheme", "chairlift", "--scheme", "request-padded"]
    assert simulate.main([*SMALL, "--rate", "50", *schemes, "--png", str(path), "--quiet"]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_pictures_are_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(pictures.NoPicturesError):
        pictures.check(Path("out.png"))
    assert simulate.main([*SMALL, "--rate", "1", "--png", "out.png"]) == 2
    assert "pip install 'chairlift[plot]'" in capsys.readouterr().err


# --- capacity --------------------------------------------------------------------------------------------


def test_the_highest_rate_within_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    assert capacity.main([*SMALL, "--first-token-p99", "0.05", "--json", str(path)]) == 0
    told = capsys.readouterr()
    found = json.loads(path.read_text())
    assert f"chairlift takes {found['rate']:.3f} requests/s within the limits" in told.out
    assert found["first_token_p99"] <= 0.05
    assert found["rate"] < found["missed_at"] <= 1.02 * found["rate"]
    assert "within the limits" in told.err


def test_the_executors_that_a_rate_needs(capsys: pytest.CaptureFixture[str]) -> None:
    args = [*SMALL, "--rate", "500", "--max-num-seqs", "4", "--first-token-p99", "0.4"]
    assert capacity.main(args) == 0
    assert "500 requests/s need" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "code", "complaint"),
    [
        ([*SMALL], 2, "no limit to keep: give one of --first-token-p50, --first-token-p99"),
        ([*SMALL, "--first-token-p50", "0"], 2, "--first-token-p50 is 0: seconds above 0 are wanted"),
        ([*SMALL, "--first-token-p50", "1", "--arrivals", "at-once"], 2, "at-once has no rate"),
        ([*SMALL, "--first-token-p50", "1e-6"], 1, "not even"),
        (
            [*SMALL, "--first-token-p50", "60"],
            2,
            "all 20 requests at once keep the limits: give more --requests",
        ),
        ([*SMALL, "--output", "1", "--between-tokens-p99", "1"], 1, "between_tokens_p99 is not known"),
        ([*SMALL, "--first-token-p50", "1", "--rate", "0"], 2, "the rate is 0"),
    ],
)
def test_limits_that_cannot_be_are_refused(
    args: list[str], code: int, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert capacity.main(args) == code
    assert complaint in capsys.readouterr().err


def test_a_flag_that_another_would_overrule_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for command, args, complaint in (
        (simulate, ["--rate", "1", "--rates", "2,3"], "--rate beside --rates"),
        (
            capacity,
            ["--first-token-p50", "1", "--rate", "1", "--executors", "2"],
            "--executors beside --rate",
        ),
    ):
        with pytest.raises(SystemExit) as end:
            command.main([*SMALL, *args])
        assert end.value.code == 2
        assert complaint in capsys.readouterr().err


def test_rates_give_a_table_each_figures_by_rate_and_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, picture = tmp_path / "out.json", tmp_path / "out.png"
    schemes = ["--scheme", "chairlift", "--scheme", "contiguous", "--max-seq-len", "2048"]
    args = [*SMALL, *schemes, "--rates", "8,2", "--json", str(path), "--png", str(picture)]
    assert simulate.main(args) == 0
    told = capsys.readouterr().out
    assert "2 a second" in told
    assert "8 a second" in told
    figures = json.loads(path.read_text())
    assert [(item["rate"], item["scheme"]) for item in figures] == [
        (2.0, "chairlift"), (2.0, "contiguous"), (8.0, "chairlift"), (8.0, "contiguous"),
    ]  # fmt: skip
    assert picture.read_bytes().startswith(b"\x89PNG")
    for rates in ("0,1", "x", "inf"):
        with pytest.raises(SystemExit):
            simulate.main([*SMALL, "--rates", rates])


def test_a_file_that_cannot_be_written_is_refused_before_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        simulate.main([*SMALL, "--rate", "1", "--json", "/absent/out.json"])
    assert "--json: it is '/absent/out.json', and there is no folder /absent" in capsys.readouterr().err


def test_tenants_are_drawn_by_their_shares_and_their_service_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "out.svg"
    args = [*SMALL, "--rate", "5", "--tenants", "a:1,b:3", "--policy", "fair", "--png", str(picture)]
    assert simulate.main(args) == 0
    text = picture.read_text()
    assert "svg" in text
    assert simulate.main([*SMALL, "--rate", "5", "--tenants", "a:0"]) == 2
    assert "'a:0' is no tenant: NAME or NAME:SHARE with a share above 0 is" in capsys.readouterr().err

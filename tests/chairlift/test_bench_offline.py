import json
from pathlib import Path
from typing import Any

import pytest

from chairlift import bench_offline
from chairlift.__main__ import main
from tests.executor.test_runner import Batch
from tests.rig import tiny_model


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def requests(*pairs: tuple[list[int], int]) -> dict[str, Any]:
    return {
        "name": "test",
        "seed": 0,
        "requests": [{"id": i, "prompt": p, "max_tokens": n} for i, (p, n) in enumerate(pairs)],
    }


def test_results_stand_in_the_order_of_the_requests_and_are_the_models_own(tmp_path: Path) -> None:
    from executor.plan import SamplingParams
    from tests.executor.numerics import load

    folder = tiny_model.build(tmp_path / "tiny")
    pairs = [(list(b"the chairs keep moving"), 9), (list(b"A"), 3), (list(b"nobody waits"), 17)]
    workload = write(tmp_path / "workload.json", requests(*pairs))
    flags = ["--model", str(folder), "--dtype", "float32", "--num-threads", "1", "--num-blocks", "64"]
    assert main(["bench", "offline", *flags, str(workload), str(tmp_path / "result.json")]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["seconds"] > 0
    assert [(each["n_in"], each["n_out"]) for each in result["requests"]] == [(22, 9), (1, 3), (12, 17)]
    runner = load(folder)
    for (prompt, max_tokens), each in zip(pairs, result["requests"], strict=True):
        greedy = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        assert each["tokens"] == Batch(runner, [prompt], [greedy]).run(max_tokens, 1000)[0]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("no json", "Expecting value"),
        ("[]", "requests is missing"),
        ('{"requests": []}', "requests is missing or empty"),
        ('{"requests": [{"prompt": [], "max_tokens": 1}]}', r"requests\[0\].prompt"),
        ('{"requests": [{"prompt": ["a"], "max_tokens": 1}]}', r"requests\[0\].prompt"),
        ('{"requests": [{"prompt": [1], "max_tokens": 0}]}', r"max_tokens is 0"),
        ('{"requests": [{"prompt": [1]}]}', r"max_tokens is None"),
    ],
)
def test_a_workload_that_is_none_is_refused_in_a_sentence(
    content: str, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "workload.json"
    path.write_text(content)
    with pytest.raises(bench_offline.StartError, match=sentence):
        bench_offline.read_workload(path)


def test_files_come_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "offline", "--model", "x"]) == 2
    assert "two files come last" in capsys.readouterr().err
    assert main(["bench", "offline", "only.json"]) == 2
    assert main(["bench", "offline"]) == 2


def test_a_result_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = write(tmp_path / "workload.json", requests(([1], 1)))
    result = tmp_path / "no" / "result.json"
    assert main(["bench", "offline", "--model", "x", str(workload), str(result)]) == 2
    assert f"RESULT.json: it is '{result}', and there is no folder" in capsys.readouterr().err


def test_a_workload_that_is_not_there_is_told_once(tmp_path: Path) -> None:
    with pytest.raises(bench_offline.StartError, match=r"^/no/such\.json cannot be read: No such file"):
        bench_offline.read_workload(Path("/no/such.json"))


def test_help_says_what_the_files_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "offline", "--help"]) == 0
    assert "max_tokens" in capsys.readouterr().out

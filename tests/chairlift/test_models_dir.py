from pathlib import Path

import pytest

from chairlift.models_dir import MANIFEST, default_models_dir, resolve
from rpc.errors import StartError


@pytest.fixture
def models_dir(tmp_path: Path) -> Path:
    return tmp_path / "models"


def test_a_path_that_exists_wins(tmp_path: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "toy", models_dir / "toy"):
        folder.mkdir(parents=True)
        (folder / "toy.gguf").touch()
    assert resolve("toy", models_dir) == Path("toy")


def test_a_name_means_the_pulled_model(models_dir: Path) -> None:
    (models_dir / "toy").mkdir(parents=True)
    (models_dir / "toy" / "toy.gguf").touch()
    assert resolve("toy", models_dir) == models_dir / "toy"


def test_a_model_that_is_nowhere_says_how_to_fetch_it(models_dir: Path) -> None:
    with pytest.raises(StartError, match=rf"chairlift pull smollm2 --models-dir {models_dir}$"):
        resolve("smollm2", models_dir)
    with pytest.raises(StartError, match="chairlift pull smollm2"):
        resolve("", models_dir)


def test_a_name_that_is_slightly_wrong_is_told_what_there_is(models_dir: Path) -> None:
    for name in ("toy", "another"):
        (models_dir / name).mkdir(parents=True)
        (models_dir / name / MANIFEST).touch()
    with pytest.raises(StartError, match=r"\(there is another, toy\); to fetch one: chairlift pull smollm2 "):
        resolve("./toyy", models_dir)
    with pytest.raises(StartError, match=r"to fetch one: chairlift pull org/toy "):
        resolve("org/toy", models_dir)


def test_the_models_dir_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHAIRLIFT_MODELS_DIR", raising=False)
    assert default_models_dir() == Path("models")
    monkeypatch.setenv("CHAIRLIFT_MODELS_DIR", "/srv/models")
    assert default_models_dir() == Path("/srv/models")

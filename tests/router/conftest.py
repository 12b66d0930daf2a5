"""Fixtures for tests of a whole router."""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from router import model_files
from router.tokenizer import Tokenizer
from tests.rig import tiny_model
from tests.router.stack import Rig, rig


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(model_files.read(tiny_model.build(tmp_path_factory.mktemp("model") / "tiny")))


@pytest.fixture
def start(tmp_path: Path, tokenizer: Tokenizer) -> Callable[..., contextlib.AbstractAsyncContextManager[Rig]]:
    return partial(rig, tmp_path, tokenizer)

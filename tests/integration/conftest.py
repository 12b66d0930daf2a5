"""Clusters that tests of one module share, because they leave nothing behind (each of them checks Q)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig import cluster
from tests.rig.cluster import Cluster


@pytest.fixture(scope="module")
def tiny_cluster(tiny_model_folder: Path) -> Iterator[Cluster]:
    """The tiny model with room for everything."""
    with cluster.running(tiny_model_folder, executor_flags=("--num-blocks", "4096")) as running:
        yield running

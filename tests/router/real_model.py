"""Where the real model of the tests marked `model` lies: $CHAIRLIFT_TEST_MODEL, else a pulled SmolLM2."""

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
REAL_MODEL = Path(os.environ.get("CHAIRLIFT_TEST_MODEL") or REPOSITORY / "models" / "smollm2")
needs_real_model = pytest.mark.skipif(
    not REAL_MODEL.exists(), reason=f"{REAL_MODEL} is not there; `chairlift pull smollm2` fetches it"
)

"""Where the second real model of the tests marked `model` lies.

$CHAIRLIFT_TEST_GEMMA, else a pulled Gemma 3 270M.
"""

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
REAL_GEMMA = Path(os.environ.get("CHAIRLIFT_TEST_GEMMA") or REPOSITORY / "models" / "gemma3-270m")
needs_real_gemma = pytest.mark.skipif(
    not REAL_GEMMA.exists(), reason=f"{REAL_GEMMA} is not there; `chairlift pull gemma3-270m` fetches it"
)

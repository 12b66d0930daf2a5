"""Real prompts of many scripts; `tests/data/prompts/LICENCES.md` says whose they are."""

import json
from pathlib import Path

PROMPTS_FILE = Path(__file__).parents[1] / "data" / "prompts" / "prompts.jsonl"


def load() -> dict[str, str]:
    """Prompt by id."""
    rows = [json.loads(line) for line in PROMPTS_FILE.read_text(encoding="utf-8").split("\n") if line]
    return {row["id"]: row["prompt"] for row in rows}

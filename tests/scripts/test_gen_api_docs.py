import importlib.util
from pathlib import Path

_PATH = Path(__file__).parents[2] / "scripts" / "gen_api_docs.py"
_spec = importlib.util.spec_from_file_location("gen_api_docs", _PATH)
assert _spec is not None
assert _spec.loader is not None
gen_api_docs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gen_api_docs)


def test_the_committed_page_is_that_of_the_contract_and_nothing_in_it_is_without_a_comment() -> None:
    text = gen_api_docs.page(gen_api_docs.descriptors())
    assert gen_api_docs.PAGE.read_text() == text, "run scripts/gen_api_docs.py"
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > 200
    assert [row for row in rows if row.endswith(("|  |", ": |"))] == []


def test_kinds_of_fields_are_told_and_types_lead_to_their_place() -> None:
    text = gen_api_docs.page(gen_api_docs.descriptors())
    assert (
        "| `Generate` | [GenerateRequest](#generaterequest) | stream [GenerateEvent](#generateevent) |"
        in text
    )
    assert "| `temperature` = 1 | optional double |" in text
    assert "| `logit_bias` = " in text
    assert "| map of " in text
    assert "*one of `prompt`*" in text
    heads = {line.removeprefix("### ").lower() for line in text.splitlines() if line.startswith("### ")}
    links = {part.partition(")")[0] for part in text.split("](#")[1:]}
    assert links <= heads

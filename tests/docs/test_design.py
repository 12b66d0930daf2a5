"""What docs/design.md lists is what there is."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("rpc", "router", "scheduler", "executor", "chairlift")


def listed(package: str) -> set[str]:
    """The modules and folders that the list names, those of folders as FOLDER/MODULE."""
    text = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    [blocks] = re.findall(r"```\n(rpc/ .*?)\n```", text, flags=re.DOTALL)
    [block] = re.findall(rf"^{package}/ (.*?)(?=^\w|\Z)", blocks, flags=re.DOTALL | re.MULTILINE)
    words = re.sub(r"\(.*?\)|the commands:|\|", " ", block).split()
    names = set()
    for word in words:
        folder, brace, inner = word.partition("{")
        names |= {folder + name for name in inner.rstrip("}").split(",")} if brace else {word}
    return names


def modules(folder: Path) -> set[str]:
    """Python modules and packages directly below a folder."""
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    return {path.stem for path in folder.glob("*.py")} - {"__init__"} | packages


@pytest.mark.parametrize("package", PACKAGES)
def test_the_list_of_modules_names_all_of_them_and_no_other(package: str) -> None:
    names = listed(package)
    assert {name.partition("/")[0] for name in names} == modules(ROOT / package)
    inner = [name.split("/") for name in names if not name.endswith("/") and "/" in name]
    for folder in {folder for folder, _ in inner}:
        assert {name for whose, name in inner if whose == folder} == modules(ROOT / package / folder)

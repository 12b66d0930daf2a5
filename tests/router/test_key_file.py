from pathlib import Path

import pytest

from router.key_file import Doorkeeper
from router.keys import ANYBODY, hashed
from rpc.errors import RequestError, StartError
from tests.rig import descriptors


def test_without_a_file_everybody_may_enter() -> None:
    assert Doorkeeper("").caller("") is ANYBODY


def test_a_file_without_keys_would_let_nobody_in_and_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    for text, says in (
        ("[default]\nmax_running = 3\n", "no table has keys, so nobody could enter"),
        ("[acme]\nkeys = 3\n", "keys is no list"),
    ):
        path.write_text(text)
        with pytest.raises(StartError, match=says):
            Doorkeeper(str(path))
    with pytest.raises(StartError, match="cannot be read: No such file"):
        Doorkeeper(str(tmp_path / "other.toml"))


def test_what_changes_in_the_file_holds_for_the_next_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(f"[a]\nkeys = ['{hashed('old')}']\n")
    door = Doorkeeper(str(path))
    assert door.caller("Bearer old").tenant == "a"
    path.write_text(f"[a]\nkeys = ['{hashed('newer')}']\n[b]\n")
    assert door.caller("Bearer newer").tenant == "a"
    with pytest.raises(RequestError):
        door.caller("Bearer old")
    path.write_text("[a]\nkeys = [")  # half a file: the keys of before stay
    assert door.caller("Bearer newer").tenant == "a"
    assert door.caller("Bearer newer").tenant == "a"
    path.unlink()
    assert door.caller("Bearer newer").tenant == "a"
    path.write_text("[a]\nkeys = []\n")  # a door that was locked stays so
    with pytest.raises(RequestError):
        door.caller("")
    told = capsys.readouterr().out
    assert told.count("keys_kept") == 2
    assert told.count("keys_read") == 2
    assert "newer" not in told


def test_a_file_that_cannot_be_read_now_is_read_as_soon_as_it_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(f"[a]\nkeys = ['{hashed('leaked')}']\n")
    door = Doorkeeper(str(path))
    path.write_text(f"[a]\nkeys = ['{hashed('fresh-one')}']\n[b]\n")
    with descriptors.none_left():
        assert door.caller("Bearer leaked").tenant == "a"
        assert door.caller("Bearer leaked").tenant == "a"
    with pytest.raises(RequestError):
        door.caller("Bearer leaked")
    assert door.caller("Bearer fresh-one").tenant == "a"
    told = capsys.readouterr().out
    assert told.count("Too many open files") == 1
    assert told.count("keys_read") == 1

"""The rules of API keys, without files or calls."""

import secrets
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import keys
from router.keys import ANYBODY, Caller, hashed, parsed
from rpc.errors import RequestError
from scheduler.config import read_tenants
from scheduler.tenants import TenantLimits

KEY, OTHER = "chairlift-one", "chairlift-two"
FILE = f"""
[acme]
keys = ["{hashed(KEY)}", "{hashed("chairlift-old")}"]
best_priority = -10
weight = 2

["globex of Springfield"]
keys = ["{hashed(OTHER)}"]
admin = true

[default]
max_running = 3
"""


def refused(authorization: str) -> RequestError:
    with pytest.raises(RequestError) as raised:
        parsed(FILE).caller(authorization)
    return raised.value


def test_a_key_tells_tenant_priority_and_admin() -> None:
    ring = parsed(FILE)
    assert ring.caller(f"Bearer {KEY}") == Caller("acme", -10, is_admin=False)
    assert ring.caller("bearer  chairlift-old ").tenant == "acme"
    assert ring.caller(f"Bearer {OTHER}") == Caller("globex of Springfield", 0, is_admin=True)
    assert len(ring) == 3


@pytest.mark.parametrize(
    ("authorization", "says"),
    [
        ("", "an API key is required: send `authorization: Bearer KEY`"),
        ("Basic eDp5", "no `Bearer KEY`"),
        ("Bearer", "no `Bearer KEY`"),
        ("Bearer ", "not known"),
        (f"Bearer {KEY}x", "not known"),
        (f"Bearer {hashed(KEY)}", "not known"),
        ("Bearer \udcff", "not known"),
    ],
)
def test_whoever_shows_no_good_key_is_told_so_and_not_which(authorization: str, says: str) -> None:
    error = refused(authorization)
    assert error.code is grpc.StatusCode.UNAUTHENTICATED
    assert says in error.message
    assert KEY not in error.message


@given(st.lists(st.text(min_size=1), unique=True, max_size=40), st.text())
def test_a_key_is_known_when_its_hash_is_in_the_file_and_only_then(known: list[str], shown: str) -> None:
    known = [key.strip() for key in known]
    ring = keys.KeyRing({hashed(key): Caller(key, 0, is_admin=False) for key in known})
    for key in known:
        assert hashed(ring.caller(f"Bearer {key}").tenant) == hashed(key)
    if shown.strip() not in known and hashed(shown.strip()) not in map(hashed, known):
        with pytest.raises(RequestError):
            ring.caller(f"Bearer {shown}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("acme = 3", "acme is no table"),
        ("[acme]\nkyes = []", "has kyes, which is none of: keys, best_priority, admin, max_blocks"),
        ("[acme]\nkeys = 'x'", "keys is no list"),
        ("[acme]\nkeys = ['secret-itself']", r"keys\[0\] must be sha256: and 64 hexadecimal digits"),
        ("[acme]\nbest_priority = 1001", "best_priority is 1001: from -1000 to 1000"),
        ("[acme]\nbest_priority = true", "best_priority is True"),
        ("[acme]\nadmin = 1", "admin is 1: it must be true or false"),
        (f"['{'x' * 129}']\n", "1 to 128 printable characters"),
        (f"[a]\nkeys=['{hashed('k')}']\n[b]\nkeys=['{hashed('k')}']", r"\[b\] has a key that \[a\] has"),
        ("[acme", "Expected"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_the_name_of_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as raised:
        parsed(text)
    assert "secret-itself" not in str(raised.value)


VALUES = ["1", "0.5", "0", "-1", "inf", "nan", "-inf", "true", "'many'", "[1]", "{a = 1}", "2026-01-01"]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("limit", [field.name for field in fields(TenantLimits)])
def test_limits_are_judged_as_the_scheduler_judges_them(tmp_path: Path, limit: str, value: str) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(f"[acme]\nkeys = ['{hashed('k')}']\n{limit} = {value}\n")

    def told(read: Callable[[], object]) -> str:
        try:
            read()
        except ValueError as error:
            return str(error)
        return ""

    refusal = told(lambda: read_tenants(str(path)))
    assert told(lambda: parsed(path.read_text())) == refusal
    assert bool(refusal) == (value not in {"1", "0.5", "inf"})


@pytest.mark.parametrize("best", [-1000, 1000])
def test_the_best_priority_of_a_key_may_be_any_that_a_request_may_have(best: int) -> None:
    ring = parsed(f'[acme]\nkeys = ["{hashed(KEY)}"]\nbest_priority = {best}')
    assert ring.caller(f"Bearer {KEY}").best_priority == best


def test_a_priority_better_than_the_key_allows_is_denied() -> None:
    caller = Caller("acme", 5, is_admin=False)
    keys.check_priority(caller, 5)
    keys.check_priority(caller, 1000)
    keys.check_priority(ANYBODY, -1000)
    with pytest.raises(RequestError) as raised:
        keys.check_priority(caller, 4)
    assert raised.value.code is grpc.StatusCode.PERMISSION_DENIED
    assert raised.value.field == "priority"
    assert "priority is 4; the key of tenant 'acme' allows 5 and higher numbers" in raised.value.message


def test_the_hash_of_the_file_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    from chairlift.key import main

    assert main([]) == 0
    key, known = (line.split()[1] for line in capsys.readouterr().out.splitlines())
    assert hashed(key) == known
    assert parsed(f"[a]\nkeys = ['{known}']").caller(f"Bearer {key}").tenant == "a"
    assert len(key) > len(secrets.token_urlsafe(32))

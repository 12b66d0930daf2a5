from enum import Enum
from typing import Literal

import pytest
from pydantic import Field, ValidationError, field_validator

from rpc.errors import StartError
from rpc.settings import ServiceSettings, load


class Surface(Enum):
    """What skis run on."""

    FRESH_SNOW = "fresh-snow"
    ICE = "ice"


class LiftSettings(ServiceSettings):
    """Settings of a service that exists in this test alone."""

    listen: str = Field(default="127.0.0.1:0", description="Where to listen.")
    max_num_seats: int = Field(default=4, ge=1, le=1_048_576, description="Most seats.")
    speed: Literal["slow", "fast"] = Field(default="slow", description="How fast.")
    surface: Surface = Field(default=Surface.FRESH_SNOW, description="What it ends at.")
    snow: Literal["dry", "very_wet"] = Field(default="very_wet", description="What lies there.")
    rope: str = Field(description="Which rope.")

    @field_validator("rope")
    @classmethod
    def _rope_exists(cls, value: str) -> str:
        if value == "none":
            raise ValueError("there is no such rope")
        return value


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHAIRLIFT_MAX_NUM_SEATS", "CHAIRLIFT_ROPE", "CHAIRLIFT_MODELS_DIR", "CHAIRLIFT_TEST_MODEL"):
        monkeypatch.delenv(name, raising=False)


def read(*argv: str) -> LiftSettings:
    return load(LiftSettings, ["--rope", "steel", *argv], prog="lift")


def test_each_field_is_a_flag_and_a_variable_and_the_flag_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read().max_num_seats == 4
    monkeypatch.setenv("CHAIRLIFT_MAX_NUM_SEATS", "5")
    assert read().max_num_seats == 5
    assert read("--max-num-seats", "6").max_num_seats == 6
    assert read("--max-num-seats=7").max_num_seats == 7


def test_a_file_that_is_missing_is_told_before_one_that_was_not_given() -> None:
    with pytest.raises(StartError, match=r"^--tls-ca is /no/such\.crt: no such file or directory$"):
        read("--tls-ca", "/no/such.crt").tls()


def test_defaults_of_every_service() -> None:
    settings = read()
    assert settings.grace_seconds == 30
    assert settings.max_message_bytes == 64 * 1024 * 1024


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--max-num-seats", "0"], "--max-num-seats is 0: it must be at least 1"),
        (["--max-num-seats", "1048577"], "--max-num-seats is 1048577: it must be at most 1048576"),
        (["--max-num-seats", "many"], "--max-num-seats is many: it must be a whole number"),
        (["--max-num-seats", "1.5"], "--max-num-seats is 1.5: it must be a whole number"),
        (["--speed", "mad"], "--speed is mad: it must be 'slow' or 'fast'"),
        (["--grace-seconds", "nan"], "--grace-seconds is nan: it must be at most 86400"),
        (["--rope", "none"], "--rope is none: there is no such rope"),
        (["--max-num-seat", "3"], "unrecognized arguments: --max-num-seat 3 (see lift --help)"),
        (["stray"], "unrecognized arguments: stray (see lift --help)"),
        (["--speed"], "argument --speed: expected one argument (see lift --help)"),
    ],
)
def test_a_wrong_flag_is_one_sentence_with_flag_value_and_limit(argv: list[str], sentence: str) -> None:
    with pytest.raises(StartError) as refusal:
        read(*argv)
    assert str(refusal.value) == sentence


def test_several_wrong_values_are_told_at_once() -> None:
    with pytest.raises(StartError, match=r"--max-num-seats is 0: .*; --speed is mad: "):
        read("--max-num-seats", "0", "--speed", "mad")


def test_a_wrong_variable_is_named_as_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIRLIFT_MAX_NUM_SEATS", "0")
    with pytest.raises(StartError, match=r"^CHAIRLIFT_MAX_NUM_SEATS is 0: it must be at least 1$"):
        read()


def test_a_missing_value_names_flag_and_variable() -> None:
    with pytest.raises(StartError, match=r"^--rope is missing \(it can be given as CHAIRLIFT_ROPE too\)$"):
        load(LiftSettings, [], prog="lift")


@pytest.mark.parametrize("name", ["chairlift_max_num_seets", "Chairlift_Max_Num_Seats"])
def test_a_variable_is_spelt_in_one_way(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "5")
    with pytest.raises(StartError, match=f"^the environment variable {name} is none of: .*CHAIRLIFT_MAX"):
        read()


def test_an_unknown_variable_of_ours_is_an_error_and_the_declared_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CHAIRLIFT_MODELS_DIR", "/models")
    assert read().max_num_seats == 4
    monkeypatch.setenv("CHAIRLIFT_MAX_NUM_SEAT", "3")
    with pytest.raises(StartError, match=r"CHAIRLIFT_MAX_NUM_SEAT is none of: .*CHAIRLIFT_MAX_NUM_SEATS"):
        read()


def test_settings_never_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        read().max_num_seats = 5  # type: ignore[misc]


def test_members_of_an_enum_are_shown_and_asked_for_as_they_are_typed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        read("--help")
    text = capsys.readouterr().out
    assert "--surface {fresh-snow,ice}" in text
    assert "(default: fresh-snow)" in text
    assert "--snow {dry,very_wet}" in text  # no member, but a word
    assert read("--snow", "very_wet").snow == "very_wet"
    assert "(default: )" not in text
    assert read("--surface", "ice").surface is Surface.ICE
    with pytest.raises(StartError, match=r"^--surface is mud: it must be 'fresh-snow' or 'ice'$"):
        read("--surface", "mud")


def test_help_tells_flags_and_defaults_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        read("--help")
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "usage: lift" in text
    assert "--max-num-seats" in text
    assert "(default: 4)" in text

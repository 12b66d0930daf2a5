"""Configuration: read once, typed, strict, frozen.

Each field of a service's settings is a flag (`--max-num-seqs`) and an environment variable
(`CHAIRLIFT_MAX_NUM_SEQS`); the flag wins. An unknown name is an error in either form, because a misspelt
limit that was silently ignored would be noticed only in production.
"""

import argparse
import os
import re
import sys
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, SettingsConfigDict, SettingsError

from rpc.errors import StartError
from rpc.tls import Tls, TlsFiles

PREFIX = "CHAIRLIFT_"
# Variables with our prefix that are not settings of a service, and who reads them.
OTHER_VARIABLES = frozenset(
    {
        "CHAIRLIFT_ADDRESS",  # the commands
        "CHAIRLIFT_API_KEY",  # the client library and the commands
        "CHAIRLIFT_CACHE_DIR",  # built kernels of the executor
        "CHAIRLIFT_MODELS_DIR",  # chairlift pull, chairlift serve
        "CHAIRLIFT_TEST_MODEL",  # the tests
        "CHAIRLIFT_TEST_GEMMA",
    }
)
_ENUM_DEFAULT = re.compile(r"\(default: [A-Z_]+\)$")
S = TypeVar("S", bound=BaseSettings)


class Settings(BaseSettings):
    """Base of all settings: how fields become flags and variables, and that they never change."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        extra="forbid",
        frozen=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )


class ServiceSettings(Settings):
    """What every service can be told."""

    listen: str = Field(
        description="Where to listen: HOST:PORT or unix:PATH, or several, separated by commas. "
        "Port 0 takes a free one."
    )
    tls_cert: str = Field(
        default="", description="Certificate (PEM, with its chain) that this process shows on every hop."
    )
    tls_key: str = Field(default="", description="The certificate's key (PEM, not encrypted).")
    tls_ca: str = Field(
        default="",
        description="CA certificates (PEM): callers must show a certificate of it, and who is called too.",
    )
    tls_server_name: str = Field(
        default="",
        max_length=253,
        description="Name expected in the certificate of who is called, in place of the address's host.",
    )
    log_format: Literal["console", "json"] = Field(
        default="console" if sys.stderr.isatty() else "json",
        description="Form of the log lines on stderr; console where that is a terminal, else json.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lines below this level are not written."
    )
    metrics_listen: str = Field(
        default="",
        description="Where to serve Prometheus metrics (plain HTTP, /metrics): HOST:PORT or unix:PATH; "
        "empty: nowhere.",
    )
    traces: str = Field(
        default="",
        description="Collector to send traces to (OpenTelemetry, OTLP over gRPC): HOST:PORT, unix:PATH or "
        "https://HOST:PORT; empty: none. The OTEL_* variables say the rest. It needs the `tracing` extra.",
    )
    grace_seconds: float = Field(
        default=30.0, ge=0, le=86_400, description="How long running requests may go on after SIGTERM."
    )
    max_message_bytes: int = Field(
        default=64 * 1024 * 1024,
        ge=1024 * 1024,
        le=2**31 - 1,
        description="Largest message sent or taken, bytes; the same on all tiers.",
    )

    @property
    def demands_certificates(self) -> bool:
        """Whether callers of the network must show a certificate."""
        return bool(self.tls_ca)

    def tls(self) -> Tls | None:
        """The certificates; None where none are given. Raises StartError."""
        files = TlsFiles(self.tls_cert, self.tls_key, self.tls_ca, self.tls_server_name)
        made = Tls(files) if files else None  # what is wrong with a file comes first
        if made is not None and not made.has_certificate:
            raise StartError(
                "--tls-ca is given without --tls-cert and --tls-key: a service that speaks TLS to others is "
                "served by TLS too"
            )
        return made


def load(settings_class: type[S], argv: list[str], *, prog: str) -> S:
    """Reads the settings from flags and environment. `--help` prints the flags and exits with 0.

    Raises:
        StartError: naming the flag or variable, the value and the limit.
    """
    _refuse_unknown_variables(settings_class, os.environ)
    try:
        source = CliSettingsSource[Any](
            settings_class, cli_prog_name=prog, cli_exit_on_error=False, formatter_class=_HelpFormatter
        )
        return CliApp.run(settings_class, cli_args=argv, cli_settings_source=source, cli_exit_on_error=False)
    except SettingsError as error:
        raise StartError(f"{str(error).removeprefix('error parsing CLI: ')} (see {prog} --help)") from error
    except ValidationError as error:
        raise StartError("; ".join(_sentence(details, argv) for details in error.errors())) from error


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help that is silent on defaults that are none, and names the members of an Enum as they are typed."""

    def add_argument(self, action: argparse.Action) -> None:
        if action.help:
            action.help = action.help.removesuffix(" (default: None)").removesuffix(" (default: )")
            action.help = _ENUM_DEFAULT.sub(lambda found: _as_typed(found.group()), action.help)
        if isinstance(action.metavar, str) and action.metavar.startswith("{") and action.metavar.isupper():
            action.metavar = _as_typed(action.metavar)
        super().add_argument(action)


def _as_typed(names: str) -> str:
    """REQUEST_PADDED as request-padded: pydantic-settings shows members by their Python names."""
    return names.lower().replace("_", "-")


def _refuse_unknown_variables(settings_class: type[BaseSettings], environ: Mapping[str, str]) -> None:
    known = OTHER_VARIABLES | {PREFIX + name.upper() for name in settings_class.model_fields}
    # In any case: pydantic takes chairlift_max_queued too, and would pass over chairlift_max_quued.
    unknown = sorted(name for name in environ if name.upper().startswith(PREFIX) and name not in known)
    if unknown:
        raise StartError(f"the environment variable {unknown[0]} is none of: {', '.join(sorted(known))}")


def _sentence(details: ErrorDetails, argv: list[str]) -> str:
    """One line on one wrong value: where it was given, what it is, what would be right."""
    name = str(details["loc"][0]) if details["loc"] else ""
    flag, variable = "--" + name.replace("_", "-"), PREFIX + name.upper()
    kind, context = details["type"], details.get("ctx", {})
    if kind == "missing":
        return f"{flag} is missing (it can be given as {variable} too)"
    given_as_flag = any(word == flag or word.startswith(flag + "=") for word in argv)
    expectations = {
        "greater_than_equal": "at least {ge:.15g}",
        "greater_than": "more than {gt:.15g}",
        "less_than_equal": "at most {le:.15g}",
        "less_than": "less than {lt:.15g}",
        "int_parsing": "a whole number",
        "int_from_float": "a whole number",
        "float_parsing": "a number",
        "finite_number": "a finite number",
        "bool_parsing": "true or false",
        "literal_error": "{expected}",
        "enum": "{expected}",
    }
    subject = f"{flag if given_as_flag else variable} is {details['input']!s}"
    if kind in expectations:
        return f"{subject}: it must be {expectations[kind].format(**context)}"
    if kind == "value_error":  # a validator of ours: its text is a sentence, with or without the subject
        sentence = str(context["error"])
        return sentence if sentence.startswith(flag) else f"{subject}: {sentence}"
    return f"{subject}: {details['msg'][:1].lower()}{details['msg'][1:]}"

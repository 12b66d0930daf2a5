"""A router's configuration, read once. Each field is a flag and an environment variable."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from router.scheduler_client import RECONNECT_SECONDS
from router.stall import STALL_SECONDS
from rpc.address import Address, AddressError, parse_groups
from rpc.settings import ServiceSettings


class RouterSettings(ServiceSettings):
    """Flags and CHAIRLIFT_ environment variables of `chairlift router`."""

    listen: str = Field(
        default="127.0.0.1:50051",
        description="Where to listen: HOST:PORT or unix:PATH. Port 0 takes a free one.",
    )
    http: str = Field(
        default="",
        description="Where to serve OpenAI's HTTP too: HOST:PORT or unix:PATH; empty: nowhere. It needs the "
        "`http` extra.",
    )
    http_hosts: str = Field(
        default="",
        description="Names that the HTTP door answers to as Host, beside localhost and addresses, separated "
        "by commas; *: any. Default: none where it listens on this machine alone and has no keys, else any.",
    )
    tls_clients: Literal["certificate", "any"] = Field(
        default="certificate",
        description="With --tls-ca, whether clients must show a certificate of it; any: their keys tell who "
        "they are. Schedulers and executors show and demand theirs either way.",
    )
    tenants: str = Field(
        default="",
        description="A TOML file of tenants with the hashes of their API keys (`chairlift key` makes one). "
        "With it, every request needs a key. The file is read again when it changes.",
    )
    model: Path = Field(
        description="Folder or GGUF file to take the tokenizer, the chat template and the defaults from."
    )
    model_name: str = Field(
        default="", max_length=256, description="The name that clients use; empty: the model's own name."
    )
    scheduler: str = Field(
        description="Scheduler to send requests to: ADDR. ADDR,ADDR: shards, each with executors of its own, "
        "share the requests. ADDR|ADDR: a scheduler and its standbys; the one that leads is used."
    )
    cluster_secret_file: Path | None = Field(
        default=None,
        description="File with at least 16 random bytes that all routers of a cluster have: they go on with "
        "each other's streams. Absent: a router verifies its own resume tokens alone, until it ends.",
    )
    generation_config: Literal["model", "none"] = Field(
        default="model",
        description="Whose values stand for sampling fields that a request leaves out: those of the model's "
        "generation config; none: temperature 1 and everything else off.",
    )
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "none"] = Field(
        default="auto",
        description="How the model writes calls of tools, which the HTTP door finds in its text; auto: as "
        "its chat template shows; none: text stays text.",
    )
    default_max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens generated for a request that does not say; absent: the model's generation "
        "config, else what fits.",
    )
    recovery_timeout: float = Field(
        default=60.0,
        ge=0,
        le=86_400,
        allow_inf_nan=False,
        description="Seconds that running requests wait for a lost scheduler; 0 ends them at once.",
    )
    shard_reconnect: float = Field(
        default=RECONNECT_SECONDS,
        ge=0,
        le=86_400,
        allow_inf_nan=False,
        description="Seconds after which requests of a lost shard go on in another one; best no less than "
        "the schedulers' --orphan-grace-seconds.",
    )
    max_request_bytes: int = Field(
        default=8 * 1024 * 1024,
        ge=64 * 1024,
        le=2**31 - 1,
        description="Largest message or body of a client, bytes; never more than --max-message-bytes.",
    )
    client_stall_seconds: float = Field(
        default=STALL_SECONDS,
        gt=0,
        le=86_400,
        allow_inf_nan=False,
        description="A client that takes nothing of its answer for this long is cut, and its request "
        "given up.",
    )

    @field_validator("scheduler")
    @classmethod
    def _scheduler_addresses(cls, value: str) -> str:
        try:
            parse_groups(value, field="--scheduler")
        except AddressError as error:
            raise ValueError(str(error)) from error
        return value

    @field_validator("http_hosts")
    @classmethod
    def _http_host_names(cls, value: str) -> str:
        for name in _names(value) or [value]:
            if not re.fullmatch(r"\*|[a-z0-9._-]*", name):
                raise ValueError(
                    f"--http-hosts has {name[:64]!r}: it must be names without scheme and port, separated by "
                    "commas, or * for any (addresses are answered without being named)"
                )
        return value

    @property
    def http_host_names(self) -> list[str]:
        """What `http_hosts` names, one by one, in small letters."""
        return _names(self.http_hosts)

    @property
    def shards(self) -> list[list[Address]]:
        """Where schedulers are looked for: each shard with its alternatives."""
        return parse_groups(self.scheduler, field="--scheduler")

    @property
    def max_taken_bytes(self) -> int:
        """The largest message or body that a client may send."""
        return min(self.max_request_bytes, self.max_message_bytes)

    @property
    def demands_certificates(self) -> bool:
        """Whether clients of the network must show a certificate."""
        return bool(self.tls_ca) and self.tls_clients == "certificate"


def _names(listed: str) -> list[str]:
    return [name for part in listed.lower().split(",") if (name := part.strip())]

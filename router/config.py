"""What a router can be told. Read once; each field is a flag and an environment variable."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from rpc.settings import ServiceSettings


class RouterSettings(ServiceSettings):
    """Settings of one router process."""

    listen: str = Field(
        default="127.0.0.1:50051",
        description="Where to listen: HOST:PORT or unix:PATH. Port 0 takes a free one.",
    )
    http: str = Field(
        default="",
        description="Where to serve OpenAI's HTTP too: HOST:PORT or unix:PATH; empty: nowhere. It needs the "
        "`http` extra.",
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
        description="Scheduler to send requests to; several, separated by commas, share the requests."
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

    @property
    def demands_certificates(self) -> bool:
        """Whether clients of the network must show a certificate."""
        return bool(self.tls_ca) and self.tls_clients == "certificate"

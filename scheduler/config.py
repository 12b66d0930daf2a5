"""What a scheduler can be told, read once at start."""

import socket

from pydantic import Field, field_validator

from rpc.address import Address, AddressError, parse_list
from rpc.settings import ServiceSettings
from scheduler.batching import Batching
from scheduler.policy import Limits


class SchedulerSettings(ServiceSettings):
    """Flags and CHAIRLIFT_ environment variables of `chairlift scheduler`."""

    listen: str = Field(
        default="127.0.0.1:50052", description="Where routers find this scheduler: HOST:PORT or unix:PATH."
    )
    executor: str = Field(
        description="Executors: ADDR[,ADDR…], or dns:///NAME:PORT whose every address is an executor.",
    )
    scheduler_id: str = Field(
        default="",
        max_length=128,
        description="Names this scheduler to executors; the same name after a restart takes over at once. "
        "Default: host name and listening address.",
    )
    max_num_seqs: int | None = Field(
        default=None,
        ge=1,
        le=65_536,
        description="Most sequences in a batch; default: the executor's own ceiling.",
    )
    max_num_batched_tokens: int | None = Field(
        default=None,
        ge=1,
        le=1_048_576,
        description="Token budget of a step; default: the executor's own ceiling.",
    )
    max_step_ms: float | None = Field(
        default=None,
        gt=0,
        le=3_600_000,
        description="Wanted duration of a step while anything decodes: prompts are cut to keep it.",
    )
    num_blocks: int | None = Field(
        default=None,
        ge=1,
        le=2**31 - 1,
        description="KV blocks to use; default and most: what the executor has.",
    )
    window: int = Field(
        default=2, ge=1, le=2, description="Plans on their way to an executor at once: 1 or 2."
    )
    watermark: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        description="Share of KV blocks kept free at admission, for the running to grow into.",
    )
    batching: Batching = Field(
        default=Batching.ITERATION,
        description="iteration: the batch is re-formed at every step. request, request-padded: it stays "
        "until its last member ends (finished rows dropped, or computed on as padding); for comparison.",
    )
    router_stall_seconds: float = Field(
        default=10.0, gt=0, le=3600, description="A router that takes nothing for this long loses its stream."
    )
    orphan_grace_seconds: float = Field(
        default=10.0, ge=0, le=3600, description="How long sequences run on when their router is gone."
    )
    reattach_seconds: float = Field(
        default=2.0,
        ge=0,
        le=3600,
        description="How long a broken executor stream may stay away before the executor counts as lost.",
    )

    @field_validator("executor")
    @classmethod
    def _executor_addresses(cls, value: str) -> str:
        try:
            parse_list(value, field="--executor")
        except AddressError as error:
            raise ValueError(str(error)) from error
        return value

    @property
    def executor_addresses(self) -> list[Address]:
        """Where executors are looked for."""
        return parse_list(self.executor, field="--executor")

    @property
    def name(self) -> str:
        """The id told to executors and routers."""
        return self.scheduler_id or f"{socket.gethostname()}/{self.listen}"

    @property
    def limits(self) -> Limits:
        """The part that is the core's."""
        return Limits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_blocks=self.num_blocks,
            window=self.window,
            max_step_us=None if self.max_step_ms is None else self.max_step_ms * 1000,
            watermark=self.watermark,
            orphan_grace_seconds=self.orphan_grace_seconds,
        )

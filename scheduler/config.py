"""The scheduler's settings, read once at start."""

import socket
import tomllib
from dataclasses import fields
from pathlib import Path

from pydantic import Field, field_validator

from rpc.address import Address, AddressError, parse_list
from rpc.settings import ServiceSettings
from scheduler.batching import Batching
from scheduler.policy import Admission, Limits
from scheduler.tenants import TenantLimits
from scheduler.waiting import Policy

DEFAULT_TENANT = "default"
# Fields of the tenants' file that only routers read: who may ask, and for what.
KEYS_OF_ROUTERS = ("keys", "best_priority", "admin")


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
    lease: str = Field(
        default="",
        description="A file that schedulers share of which one leads and the others stand by; each needs a "
        "--scheduler-id of its own. Default: this one leads alone.",
    )
    lease_seconds: float = Field(
        default=5.0,
        ge=0.5,
        le=3600,
        description="A leader that leaves its lease alone for this long is taken to be frozen; one that ends "
        "is replaced at once.",
    )
    max_num_seqs: int | None = Field(
        default=None,
        ge=1,
        le=65_536,
        description="Most sequences in a batch; default: the executor's own ceiling. Never more than the "
        "token budget of a step.",
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
    late_plans: bool = Field(
        default=True,
        description="Whether the plan behind a running step leaves as late as it can, so that who comes "
        "meanwhile waits for one step and not for two.",
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
    policy: Policy = Field(
        default=Policy.FCFS,
        description="Who is served next within an importance class: fcfs, first come first served; fair, the "
        "tenant that was served least; deadline, least slack first, hopeless work refused.",
    )
    admission: Admission = Field(
        default=Admission.FORECAST,
        description="Room a newcomer must find: reserve, for everybody's whole length; forecast, for the "
        "expected peak; optimistic, for its context (preempts most, for comparison).",
    )
    aging_seconds: float | None = Field(
        default=10.0, gt=0, le=86_400, description="Waiting this long is worth one importance class."
    )
    prefix_caching: bool = Field(
        default=True, description="Whether equal beginnings of prompts are computed once."
    )
    num_speculative_tokens: int = Field(
        default=8,
        ge=0,
        le=15,
        description="Most tokens of a sequence that are guessed from its own text and checked in one step, "
        "where executors can and it pays (on CPUs, in small batches); it changes no answer. 0: none.",
    )
    max_queued: int | None = Field(
        default=4096,
        ge=0,
        le=1_000_000,
        description="Most waiting requests beyond the free seats; the next one gets RESOURCE_EXHAUSTED. "
        "Those of tenants at a limit of their own are counted apart, to the same number.",
    )
    max_queued_tokens: int | None = Field(
        default=16_777_216, ge=1, le=2**40, description="Most prompt tokens of all waiting requests."
    )
    tenants: str = Field(
        default="",
        description="A TOML file of tenants: a table for each name, [default] for all others, with weight, "
        "max_running, max_blocks, max_queued, max_queued_tokens, requests_per_minute, tokens_per_minute. The "
        "same file holds the keys that routers ask for.",
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

    recovery_timeout: float = Field(
        default=60.0,
        ge=0,
        le=86_400,
        allow_inf_nan=False,
        description="Seconds that running requests wait when no executor is left; 0 ends them at once.",
    )
    step_timeout: float = Field(
        default=10.0,
        gt=0,
        le=86_400,
        allow_inf_nan=False,
        description="A step that takes more seconds than this, and than 20 times what was predicted for it, "
        "means that the executor hangs: it is opened anew, and what it had is computed elsewhere.",
    )
    record: str = Field(
        default="",
        description="A file that everything this scheduler is told is written to, without token ids, for "
        "`chairlift replay`. One that is there is kept, and the new one numbered.",
    )

    @field_validator("executor")
    @classmethod
    def _executor_addresses(cls, value: str) -> str:
        try:
            parse_list(value, field="--executor")
        except AddressError as error:
            raise ValueError(str(error)) from error
        return value

    @field_validator("scheduler_id")
    @classmethod
    def _printable_id(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError("it must consist of printable characters")
        return value

    @field_validator("tenants")
    @classmethod
    def _tenants_file(cls, value: str) -> str:
        read_tenants(value)
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
        """The part that concerns the core."""
        tenants = read_tenants(self.tenants)
        return Limits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_blocks=self.num_blocks,
            window=self.window,
            late_plans=self.late_plans,
            max_step_us=None if self.max_step_ms is None else self.max_step_ms * 1000,
            policy=self.policy,
            admission=self.admission,
            aging_seconds=self.aging_seconds,
            prefix_caching=self.prefix_caching,
            num_speculative_tokens=self.num_speculative_tokens,
            watermark=self.watermark,
            max_queued=self.max_queued,
            max_queued_tokens=self.max_queued_tokens,
            default_tenant=tenants.pop(DEFAULT_TENANT, TenantLimits()),
            tenants=tenants,
            orphan_grace_seconds=self.orphan_grace_seconds,
            recovery_timeout_seconds=self.recovery_timeout,
        )


def read_tenants(path: str) -> dict[str, TenantLimits]:
    """The tenants of a TOML file, by name; none for an empty path. Raises ValueError with a sentence."""
    if not path:
        return {}
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError((error.strerror or str(error)).lower()) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"it cannot be read as TOML: {error}") from error
    known = [field.name for field in fields(TenantLimits)]
    limits = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ValueError(f"{name} is no table: write [{name}] and its limits below")  # noqa: TRY004  (one kind of error)
        mine = {key: value for key, value in table.items() if key not in KEYS_OF_ROUTERS}
        for key, value in mine.items():
            if key not in known:
                names = ", ".join((*KEYS_OF_ROUTERS, *known))
                raise ValueError(f"[{name}] has {key}, which is none of: {names}")
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"[{name}] {key} is {value!r}: it must be a number")  # noqa: TRY004
        try:
            limits[name] = TenantLimits(**mine)
        except ValueError as error:
            raise ValueError(f"[{name}] {error}") from error
    return limits

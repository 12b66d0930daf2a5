"""Starts a router: `python -m router --model PATH --scheduler ADDRESS`."""

import rpc.early_stop  # noqa: F401 # isort: skip - before the imports that take seconds

import sys
import uuid
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from protos.v1 import router_pb2, router_pb2_grpc
from router import aside, model_files, tool_calls, validation
from router.config import RouterSettings
from router.intake import Intake, ServedModel
from router.key_file import Doorkeeper
from router.metrics import RouterMetrics
from router.model_files import GenerationDefaults
from router.resume import MIN_SECRET_BYTES, ResumeTokens
from router.scheduler_client import SchedulerClient
from router.scheduler_pool import SchedulerPool
from router.scheduler_session import TokenizerIdentity
from router.servicer import RouterServicer, header
from router.tokenizer import Tokenizer
from router.validation import Defaults
from rpc import collector, log, tracing
from rpc.errors import StartError
from rpc.health import Health
from rpc.server import main, serve
from rpc.settings import load
from rpc.tls import Tls
from rpc.tracing import Tracer

if TYPE_CHECKING:  # its libraries are an extra
    from router.http.server import HttpDoor

# A scheduler that restarts, or hands over to its standby, must not take every router out of its balancer.
PATIENCE_SECONDS = 10.0
SERVICE_NAME: str = router_pb2.DESCRIPTOR.services_by_name["Router"].full_name


async def run_router() -> int:
    """Serves until told to stop; returns the exit code. Raises StartError when it cannot start."""
    settings = load(RouterSettings, sys.argv[1:], prog="chairlift router")
    log.configure("router", fmt=settings.log_format, level=settings.log_level)
    with tracing.opened(settings, "router") as tracer:
        return await _serve(settings, tracer)


async def _serve(settings: RouterSettings, tracer: Tracer | None) -> int:
    certificates = settings.tls()
    doorkeeper = Doorkeeper(settings.tenants)
    try:
        files = model_files.read(settings.model)
        tokenizer = Tokenizer(files)
    except model_files.ModelFilesError as error:
        raise StartError(str(error)) from error
    health = Health([SERVICE_NAME], patience_seconds=PATIENCE_SECONDS)
    router_id = f"router-{uuid.uuid4().hex[:12]}"

    def tell_health() -> None:
        health.serving(schedulers.refusal is None, schedulers.refusal or "")

    schedulers = SchedulerPool(
        [
            SchedulerClient(
                address,
                router_id=router_id,
                tokenizer=TokenizerIdentity(tokenizer.fingerprint, tokenizer.vocab_size),
                recovery_timeout_seconds=settings.recovery_timeout,
                max_message_bytes=settings.max_message_bytes,
                on_serving_changed=tell_health,
                shard="|".join(sorted(map(str, addresses))),
                reconnect_seconds=settings.shard_reconnect,
                tls=certificates,
            )
            for addresses in settings.shards
            for address in addresses
        ]
    )
    intake = Intake(
        model=ServedModel(
            name=settings.model_name or files.name,
            tokenizer=tokenizer,
            defaults=_defaults(
                files.generation_defaults if settings.generation_config == "model" else GenerationDefaults(),
                settings.default_max_tokens,
            ),
            tool_call_form=tool_calls.chosen_form(settings.tool_call_parser, files.chat_template),
            chat_template=files.chat_template,
        ),
        schedulers=schedulers,
        tokens=_resume_tokens(settings.cluster_secret_file),
        tracer=tracer,
    )
    servicer = RouterServicer(
        intake=intake,
        schedulers=schedulers,
        max_message_bytes=settings.max_taken_bytes,
        client_stall_seconds=settings.client_stall_seconds,
        doorkeeper=doorkeeper,
    )
    http_door = _http_door(intake, schedulers, settings, doorkeeper, certificates) if settings.http else None
    collector.configure()
    aside.configure()
    try:
        return await serve(
            settings,
            services={SERVICE_NAME: partial(router_pb2_grpc.add_RouterServicer_to_server, servicer)},
            health=health,
            run=schedulers.run,
            drain=intake.drain,
            admit=lambda metadata: doorkeeper.caller(header(metadata, "authorization")),
            max_received_bytes=settings.max_taken_bytes,
            side_doors=[] if http_door is None else [http_door],
            metrics=[
                RouterMetrics(intake, schedulers).families,
                *([] if http_door is None else [http_door.metrics]),
            ],
        )
    finally:
        await intake.close()


def _resume_tokens(secret_file: Path | None) -> ResumeTokens | None:
    """Tokens with the cluster's secret; None without a file. Raises StartError."""
    if secret_file is None:
        return None
    try:
        secret = secret_file.read_bytes()
    except OSError as error:
        raise StartError(
            f"--cluster-secret-file is {secret_file}: it cannot be read ({error.strerror})"
        ) from error
    if len(secret) < MIN_SECRET_BYTES:
        raise StartError(
            f"--cluster-secret-file is {secret_file}, of {len(secret)} bytes: it must have at least "
            f"{MIN_SECRET_BYTES} (`head -c 32 /dev/urandom > FILE` makes one)"
        )
    return ResumeTokens(secret)


def _http_door(
    intake: Intake,
    schedulers: SchedulerPool,
    settings: RouterSettings,
    doorkeeper: Doorkeeper,
    certificates: Tls | None,
) -> "HttpDoor":
    """The HTTP door. Its libraries are an extra. Raises StartError when they are not there."""
    try:
        from router.http import hosts
        from router.http.app import HttpApp
        from router.http.live import Live
        from router.http.server import HttpDoor
    except ImportError as error:
        raise StartError(
            f"--http needs libraries that are not installed ({error.name}); "
            "`pip install 'chairlift[router,http]'` brings them"
        ) from error

    async def story(request_id: str, tenant: str) -> dict[str, object]:
        validation.check_request_id(request_id)
        return await schedulers.first_answer(lambda scheduler: scheduler.time_line(request_id, tenant))

    names = settings.http_host_names
    if not names:
        is_local = hosts.is_of_this_machine(settings.http.rpartition(":")[0])
        names = [] if is_local and not settings.tenants else ["*"]
    app = HttpApp(
        intake,
        max_body_bytes=settings.max_taken_bytes,
        client_stall_seconds=settings.client_stall_seconds,
        doorkeeper=doorkeeper,
        live=Live(
            [client.follow for client in schedulers.clients],
            intake.latencies,
            refusal=lambda: intake.refusal,
            story=story,
        ),
        host_names=None if "*" in names else names,
    )
    return HttpDoor(
        app,
        settings.http,
        tls=certificates,
        demand_certificates=settings.demands_certificates,
    )


def _defaults(model: GenerationDefaults, max_tokens: int | None) -> Defaults:
    """The model's own defaults where it has any; the flag wins over the model's length of answer."""
    plain = Defaults()
    return Defaults(
        temperature=plain.temperature if model.temperature is None else model.temperature,
        top_p=plain.top_p if model.top_p is None else model.top_p,
        top_k=plain.top_k if model.top_k is None else model.top_k,
        min_p=plain.min_p if model.min_p is None else model.min_p,
        repetition_penalty=(
            plain.repetition_penalty if model.repetition_penalty is None else model.repetition_penalty
        ),
        max_tokens=model.max_tokens if max_tokens is None else max_tokens,
    )


if __name__ == "__main__":
    main("chairlift router", run_router)

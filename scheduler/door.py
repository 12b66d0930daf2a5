"""Which requests are refused, and why: the checks of a new request, each with a sentence for its client.

A resubmission of a request whose acceptance its client has already seen is counted as any other but never
refused for load; if no executor can compute it, it waits for one (`stranded`). The choices of a request are
taken or refused as a whole: once one was taken in, load is no reason to refuse the others. Pure.
"""

from scheduler.core_state import CoreState
from scheduler.sequence import Request, Sequence, StatusCode
from scheduler.tenants import Tenant
from scheduler.token_ids import NO_IDS
from scheduler.waiting import Policy


class RefusedError(Exception):
    """A request is not taken in: a sentence for the client, and the status it gets."""

    def __init__(
        self, status_code: StatusCode, message: str, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.message = message
        self.retry_after_seconds = retry_after_seconds


def check_same_body(live: Request, request: Request) -> None:
    """Raises RefusedError if `request` is another request than the live one with its key."""
    if live.body_digest != request.body_digest:
        raise RefusedError(
            StatusCode.ALREADY_EXISTS,
            f"request_id {request.request_id!r} is in use by a different request; choose another",
        )


def check(core: CoreState, request: Request, tenant: Tenant, now: float) -> None:
    """Raises RefusedError if the request is not to be taken in."""
    _check_fits(core, request)
    if not request.accepted_before and not core.has_sibling(request):
        _check_queue(core, tenant, request, now)
        _check_tenant(core, tenant, request, now)
        _check_hopeless(core, request, tenant, now)


def _check_fits(core: CoreState, request: Request) -> None:
    lengths = f"prompt has {len(request.prompt_token_ids)} tokens and max_tokens is {request.max_tokens}"
    if not request.prompt_token_ids or request.max_tokens < 1:
        raise RefusedError(StatusCode.INVALID_ARGUMENT, f"{lengths}: each must be at least 1")
    if request.accepted_before:
        return  # it waits for an executor that can compute it
    if not core.executors:
        raise RefusedError(StatusCode.UNAVAILABLE, "no executor is attached; try again when one is")
    if request.needs and not request.needs <= core.features:
        raise RefusedError(
            StatusCode.UNIMPLEMENTED,
            f"the request needs the abilities {sorted(request.needs)}; the executors here all have "
            f"{sorted(core.features)}",
        )
    num_tokens = len(request.prompt_token_ids) + request.max_tokens
    if num_tokens > core.max_total_tokens:
        raise RefusedError(
            StatusCode.INVALID_ARGUMENT,
            f"{lengths}: their sum {num_tokens} must be at most {core.max_total_tokens}",
        )


def _check_queue(core: CoreState, tenant: Tenant, request: Request, now: float) -> None:
    """Limits the queue. Requests held back by their own tenant's limit are not in the way of others.

    They are counted apart, up to the same number; what exceeds it (tenants may reach their limits only later)
    counts with the others again.
    """
    limits = core.limits
    if limits.max_queued is not None:
        num_held_back = core.waiting.num_held_back
        if core.waiting.is_held_back(tenant) and num_held_back >= limits.max_queued:
            sentence = (
                f"{num_held_back} requests are waiting whose tenants are at limits of their own, as "
                f"{tenant.name!r} is; the most is {limits.max_queued}"
            )
            raise RefusedError(StatusCode.RESOURCE_EXHAUSTED, sentence, 1.0)
        num_waiting = len(core.waiting) - min(num_held_back, limits.max_queued)
        if num_waiting - core.num_free_seats >= limits.max_queued:
            sentence = f"{num_waiting} requests are waiting, the limit is {limits.max_queued}"
            raise _overloaded(core, sentence, num_waiting, now)
    if limits.max_queued_tokens is not None:
        num_tokens = len(request.prompt_token_ids)
        if num_tokens > limits.max_queued_tokens:
            raise RefusedError(
                StatusCode.INVALID_ARGUMENT,
                f"the prompt has {num_tokens} tokens, the whole queue at most {limits.max_queued_tokens}",
            )
        if core.waiting.num_tokens + num_tokens > limits.max_queued_tokens:
            sentence = (
                f"{core.waiting.num_tokens} prompt tokens are waiting and this request has {num_tokens}, "
                f"the limit is {limits.max_queued_tokens}"
            )
            raise _overloaded(core, sentence, len(core.waiting), now)


def _check_tenant(core: CoreState, tenant: Tenant, request: Request, now: float) -> None:
    limits = tenant.limits
    whose = f"tenant {tenant.name!r}"
    if limits.max_queued is not None and tenant.num_waiting - _own_seats(core, tenant) >= limits.max_queued:
        sentence = (
            f"{whose} has {tenant.num_waiting} requests waiting, "
            f"its limit is {limits.max_queued} beyond the free seats"
        )
        raise RefusedError(StatusCode.RESOURCE_EXHAUSTED, sentence, 1.0)
    if limits.max_queued_tokens is not None:
        num_prompt_tokens = len(request.prompt_token_ids)
        if num_prompt_tokens > limits.max_queued_tokens:
            raise RefusedError(
                StatusCode.INVALID_ARGUMENT,
                f"the prompt has {num_prompt_tokens} tokens, "
                f"the whole queue of {whose} at most {limits.max_queued_tokens}",
            )
        waiting = tenant.num_waiting_tokens + num_prompt_tokens
        if waiting > limits.max_queued_tokens:
            sentence = f"{whose} would have {waiting} tokens waiting, its limit is {limits.max_queued_tokens}"
            raise RefusedError(StatusCode.RESOURCE_EXHAUSTED, sentence, 1.0)
    num_tokens = len(request.prompt_token_ids) + request.max_tokens
    for limiter, amount, unit in ((tenant.requests, 1, "requests"), (tenant.tokens, num_tokens, "tokens")):
        wait = limiter.seconds_until(amount, now) if limiter is not None else 0.0
        if limiter is not None and wait > 0:
            sentence = f"{whose} is at its rate limit of {limiter.per_minute:g} {unit} a minute"
            raise RefusedError(StatusCode.RESOURCE_EXHAUSTED, f"{sentence}; try again in {wait:.1f} s", wait)


def _own_seats(core: CoreState, tenant: Tenant) -> int:
    """Free seats that the tenant's own limit lets it take: a request for one of these is hardly queued."""
    free = core.num_free_seats
    limit = tenant.limits.max_running
    return free if limit is None else min(free, max(0, limit - tenant.num_running))


def _check_hopeless(core: CoreState, request: Request, tenant: Tenant, now: float) -> None:
    """Under the deadline policy, refuses a request that cannot be done in time (but see `doubt`)."""
    if core.limits.policy is not Policy.DEADLINE or request.deadline is None or request.deadline <= now:
        return
    num_waiting = len(core.waiting)
    wait = core.drain_rate.predicted_wait(num_waiting, now) if num_waiting else 0.0
    # A lower bound: neither its output length nor how much of its prompt is cached is known yet.
    service = core.slack.least_service(Sequence.of(request, tenant, NO_IDS, 0))
    if now + service > request.deadline and core.doubt.may_refuse(now):
        left = request.deadline - now
        raise RefusedError(
            StatusCode.RESOURCE_EXHAUSTED,
            f"the deadline is in {left:.3f} s and this request takes at least {service:.3f} s "
            f"after a wait of {wait:.2f} s",
            max(wait, 0.05),
        )


def _overloaded(core: CoreState, sentence: str, num_ahead: int, now: float) -> RefusedError:
    wait = core.drain_rate.predicted_wait(num_ahead, now)
    return RefusedError(StatusCode.RESOURCE_EXHAUSTED, f"{sentence}; try again in {wait:.1f} s", wait)

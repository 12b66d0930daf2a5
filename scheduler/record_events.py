"""The format of a record: each call of the scheduler's core as a JSON value, and back. Holds no token ids.

    ids         a b c d │ e f g h │ i j           stretches of 4 ids; the last one is not full
    recorded    D1        D2        (how many)     D1 = hash(D0, a b c d), D2 = hash(D1, e f g h), keyed
    replayed    D1 · 0 0  D2 · 0 0  0 0            synthetic ids, equal as far as the digests are

A stretch is as long as a KV block, so logs that begin with the same blocks begin with the same synthetic
blocks, and prefix hits come out the same. The key is drawn anew for each record and is not in it, so nobody
can test guesses of a prompt. Whether ids end a request, or continue where its reader left off, is recorded as
an outcome. Texts that could reveal something (cache salts, error messages) are hashed or left out; names of
tenants and requests stay, since people search for them.

Pure. The order of fields is not fixed; a field at its default is left out.
"""

import json
from array import array
from base64 import b64decode, b64encode
from dataclasses import MISSING, asdict, fields
from enum import Enum
from hashlib import blake2b
from typing import Any

from scheduler.batching import Batching
from scheduler.plan import BatchPlan, Capacity, FinishedSequence, SequenceError, StepResult
from scheduler.policy import Admission, Limits
from scheduler.sequence import FinishReason, Request, StatusCode
from scheduler.tenants import TenantLimits
from scheduler.token_ids import TokenIds
from scheduler.waiting import Policy

FORMAT = 1
DIGEST_BYTES = 8
Event = dict[str, Any]


# --- token logs ------------------------------------------------------------------------------------------


class Digester:
    """Digests of token logs under one key, by stretches of `num_ids` ids."""

    __slots__ = ("_secret", "num_ids")

    def __init__(self, num_ids: int, secret: bytes) -> None:
        self.num_ids = num_ids
        self._secret = secret

    def of_stretch(self, before: bytes, ids: TokenIds) -> bytes:
        """Digest of a full stretch; `before` is that of the one before it, empty for the first."""
        return blake2b(before + ids.tobytes(), digest_size=DIGEST_BYTES, key=self._secret).digest()

    def of_log(self, ids: TokenIds, before: bytes = b"") -> list[bytes]:
        """Digests of all full stretches of a log, or of its part behind the stretch with digest `before`."""
        digests: list[bytes] = []
        for start in range(0, len(ids) - self.num_ids + 1, self.num_ids):
            before = self.of_stretch(before, ids[start : start + self.num_ids])
            digests.append(before)
        return digests

    def of_text(self, text: bytes) -> str:
        """Digest of a text that is only compared for equality; an empty text stays empty."""
        return blake2b(b"text" + text, digest_size=DIGEST_BYTES, key=self._secret).hexdigest() if text else ""


def synthetic_stretches(digests: bytes, num_ids: int) -> TokenIds:
    """Ids in place of those that these joined digests stand for."""
    ids: TokenIds = array("I")
    for start in range(0, len(digests), DIGEST_BYTES):
        stretch: TokenIds = array("I", digests[start : start + DIGEST_BYTES])
        ids.extend((stretch + array("I", bytes(4 * num_ids)))[:num_ids])
    return ids


def synthetic_log(digests: bytes, length: int, num_ids: int) -> TokenIds:
    """Ids in place of a log of this length; a last stretch that is not full is zeros."""
    if len(digests) != DIGEST_BYTES * (length // num_ids):
        raise ValueError(
            f"{length} ids have {length // num_ids} digests, not {len(digests) / DIGEST_BYTES:g}"
        )
    return synthetic_stretches(digests, num_ids) + array("I", bytes(4 * (length % num_ids)))


# --- the first line --------------------------------------------------------------------------------------


def header(limits: Limits, batching: Batching, num_ids: int, **told: object) -> Event:
    """Settings, and what else is recorded for people to read."""
    return {
        "format": FORMAT,
        **told,
        "stretch": num_ids,
        "batching": batching.value,
        "limits": json.loads(json.dumps(asdict(limits), default=_plain)),
    }


def limits_of(event: Event) -> Limits:
    """The settings in a header."""
    values = dict(event["limits"])
    values["policy"], values["admission"] = Policy(values["policy"]), Admission(values["admission"])
    values["default_tenant"] = TenantLimits(**values["default_tenant"])
    values["tenants"] = {name: TenantLimits(**item) for name, item in values["tenants"].items()}
    return Limits(**values)


# --- what clients want -----------------------------------------------------------------------------------

_AS_THEY_ARE = (
    "request_id", "max_tokens", "ignore_eos", "sample_index", "group", "priority", "tenant",
    "deadline", "arrival", "accepted_before", "want_logprobs", "want_prompt_logprobs",
)  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    item.name: None if item.default is MISSING else item.default for item in fields(Request)
}


def request_event(request: Request, num_output: int, digester: Digester, digests: list[bytes]) -> Event:
    """A request; `digests` are those of its prompt and of the `num_output` ids that it comes with."""
    event: Event = {"key": request.key.hex(), "prompt": len(request.prompt_token_ids), "output": num_output}
    for name in _AS_THEY_ARE:
        value = getattr(request, name)
        if value != _DEFAULTS[name]:
            event[name] = value
    if request.needs:
        event["needs"] = sorted(request.needs)
    for name, text in (("cache_salt", request.cache_salt.encode()), ("body", request.body_digest)):
        if text:
            event[name] = digester.of_text(text)
    return event | {"digests": b64encode(b"".join(digests)).decode()}


def request_of(event: Event, num_ids: int) -> tuple[Request, TokenIds]:
    """The request and its output ids, all synthetic; if those end it, its stop ids say so."""
    num_prompt_tokens, num_output_tokens = event["prompt"], event["output"]
    ids = synthetic_log(b64decode(event["digests"]), num_prompt_tokens + num_output_tokens, num_ids)
    request = Request(
        key=bytes.fromhex(event["key"]),
        prompt_token_ids=ids[:num_prompt_tokens],
        sampling=b"",
        cache_salt=event.get("cache_salt", ""),
        body_digest=bytes.fromhex(event.get("body", "")),
        needs=frozenset(event.get("needs", ())),
        stop_token_ids=frozenset(ids[-1:]) if event.get("is_over") else frozenset(),
        **{name: event.get(name, _DEFAULTS[name]) for name in _AS_THEY_ARE},
    )
    return request, ids[num_prompt_tokens:]


# --- executors -------------------------------------------------------------------------------------------


def capacity_event(capacity: Capacity) -> Event:
    """What an executor can take, except for its end tokens."""
    return asdict(capacity) | {"eos_token_ids": [], "features": sorted(capacity.features)}


def capacity_of(event: Event) -> Capacity:
    """The inverse."""
    return Capacity(**event | {"eos_token_ids": frozenset(), "features": frozenset(event["features"])})


def plan_digest(plan: BatchPlan) -> str:
    """Equal for equal plans, whatever their token ids are."""
    admitted = [
        (item.seq_id, len(item.token_ids), item.num_prompt_tokens, item.num_computed_tokens, item.block_ids,
         item.prompt_logprobs_from)
        for item in plan.admitted
    ]  # fmt: skip
    columns = (
        plan.epoch, plan.step_id, plan.acked_step_id, plan.released_seq_ids, admitted, plan.seq_ids,
        plan.num_tokens, plan.grown_seq_ids, plan.num_new_blocks, plan.new_block_ids, plan.positions_sum,
        plan.num_samples,
    )  # fmt: skip
    return blake2b(repr(columns).encode(), digest_size=DIGEST_BYTES).hexdigest()


def plan_event(plan: BatchPlan) -> Event:
    """What is recorded of a plan: its digest, and what the core read from token ids."""
    event: Event = {"step": plan.step_id, "plan": plan_digest(plan)}
    if plan.draft_tokens:
        event["draft_tokens"] = {seq_id: len(ids) for seq_id, ids in plan.draft_tokens.items()}
    return event


def result_event(result: StepResult, plan: BatchPlan | None, full: dict[int, bytes]) -> Event:
    """A result of `plan`; `full` are the joined digests of the stretches that it fills, by seq_id."""
    event: Event = {"step": result.step_id, "us": result.total_us, "idle_us": result.idle_us}
    is_as_planned = (
        plan is not None
        and result.epoch == plan.epoch
        and result.seq_ids == plan.seq_ids
        and result.num_sampled == plan.num_samples
        and len(result.token_ids) == sum(plan.num_samples)
    )
    if not is_as_planned:
        event["epoch"] = result.epoch
        event["rows"] = [result.seq_ids, result.num_sampled, len(result.token_ids)]
    if full:
        event["full"] = {seq_id: digest.hex() for seq_id, digest in full.items()}
    if result.logprobs:
        event["logprobs"] = {seq_id: len(entries) for seq_id, entries in result.logprobs.items()}
    if result.prompt_logprobs:
        event["prompt_logprobs"] = {
            seq_id: [first, len(entries)] for seq_id, (first, entries) in result.prompt_logprobs.items()
        }
    if result.finished:
        event["finished"] = [[item.seq_id, item.reason] for item in result.finished]
    if result.errors:
        event["errors"] = [[item.seq_id, item.status_code] for item in result.errors]
    if result.draining:
        event["draining"] = result.seconds_to_leave
    return event


def result_of(event: Event, plan: BatchPlan | None) -> StepResult:
    """The result of `plan`, with all its ids 0."""
    if "rows" in event:
        epoch, (seq_ids, num_sampled, num_ids) = event["epoch"], event["rows"]
    elif plan is not None:
        epoch, seq_ids, num_sampled = plan.epoch, plan.seq_ids, plan.num_samples
        num_ids = sum(num_sampled)
    else:
        raise ValueError(f"step {event['step']} was answered, and was not planned")
    return StepResult(
        epoch,
        event["step"],
        list(seq_ids),
        list(num_sampled),
        [0] * num_ids,
        logprobs={int(seq_id): [None] * count for seq_id, count in event.get("logprobs", {}).items()},
        prompt_logprobs={
            int(seq_id): (first, [None] * count)
            for seq_id, (first, count) in event.get("prompt_logprobs", {}).items()
        },
        finished=[FinishedSequence(seq_id, FinishReason(code)) for seq_id, code in event.get("finished", ())],
        errors=[SequenceError(seq_id, "", StatusCode(code)) for seq_id, code in event.get("errors", ())],
        draining="draining" in event,
        seconds_to_leave=event.get("draining", 0.0),
        total_us=event["us"],
        idle_us=event["idle_us"],
    )


# --- lines -----------------------------------------------------------------------------------------------


def line(event: Event) -> bytes:
    """One event as it is written."""
    return json.dumps(event, separators=(",", ":"), default=_plain).encode() + b"\n"


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{value!r} has no place in a record")

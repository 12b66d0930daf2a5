"""A tool that reads the door's description and asks what it makes of it: `python -m tests.router.http.asking
URL NUM_INPUTS MODE SEED`, which prints how many it sent.

A process of its own for the long form: what the tool keeps, and some of its inputs take gigabytes to make, is
then neither held against the door nor piled up.
"""

import itertools
import json
import resource
import sys
from functools import cache

import httpx2
import jsonschema
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from router.http import description
from tests.router.afar import drawn

MAX_MEMORY_BYTES = 6 << 30
REFUSALS = ["400", "404", "413", "415"]
MAX_EVENTS = 1 << 20  # of a stream, which the tool otherwise stops reading after twenty
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.negative_data_rejection,
]


def ask(url: str, num_inputs: int, mode: GenerationMode, start: int) -> int:
    """So many inputs to each call, right or wrong by the description; what comes back is as described.

    Returns how many were sent: there are few different ones to some of the calls.
    """
    num_sent = itertools.count()
    schema = schemathesis.openapi.from_dict(description.described())
    schema.config.max_stream_events = MAX_EVENTS
    schema.config.checks.negative_data_rejection.expected_statuses = REFUSALS
    with httpx2.Client(base_url=url, timeout=60) as client:
        for result in schema.get_all_operations():
            operation = result.ok()
            if mode is GenerationMode.NEGATIVE and operation.method == "get":
                continue  # nothing can be wrong about them

            @drawn(num_inputs, start, case=operation.as_strategy(generation_mode=mode))
            def once(case: schemathesis.Case) -> None:
                next(num_sent)
                response = case.call(base_url=url)
                if response.headers["content-type"][0].startswith("text/event-stream"):
                    case.validate_response(response, checks=CHECKS)
                    check_events(case.path, response.text)
                else:
                    case.validate_response(response, checks=[*CHECKS, checks.response_schema_conformance])

            once()
        probe = client.post("/v1/completions", json={"prompt": "Hi"})
        assert probe.json()["choices"][0]["text"] == "ok"
    return next(num_sent)


def check_events(path: str, body: str) -> None:
    """A stream as described: values of the kind that is named, then [DONE] or a last one that is an error.

    That of a response ends by its own word.
    """
    *pieces, last, nothing = body.split("\n\n")
    assert nothing == ""
    if path == "/v1/responses":
        pieces.append(last)
        assert last.startswith(("event: response.completed\n", "event: response.incomplete\n"))
    elif last != "data: [DONE]":
        validator("#/components/schemas/Error").validate(json.loads(last.removeprefix("data: ")))
    events = [piece[piece.index("data: ") + len("data: ") :] for piece in pieces]
    described = description.described()["paths"][path]["post"]["responses"]["200"]["content"]
    kind = described["text/event-stream"]["x-event-schema"]["$ref"]
    for event in events:
        validator(kind).validate(json.loads(event))


@cache
def validator(reference: str) -> jsonschema.Draft202012Validator:
    """What checks values of one of the description's schemas."""
    return jsonschema.Draft202012Validator(description.described() | {"$ref": reference})


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    address, num_wanted, mode_name, first = sys.argv[1:]
    sys.stdout.write(str(ask(address, int(num_wanted), GenerationMode[mode_name], int(first))))

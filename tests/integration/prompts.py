"""Prompts of a wanted length, and what a scripted executor answers to them."""

from typing import Any

from protos.v1 import router_pb2
from tests.rig.client import request


def prompt(num_tokens: int, salt: int = 0) -> list[int]:
    """Ids below 256, so that they are bytes for the tiny model; different for each salt."""
    return [(7 * position + 31 * salt + position * position) % 251 for position in range(num_tokens)]


def sized(
    num_prompt_tokens: int, max_tokens: int | None, salt: int = 0, **fields: Any
) -> router_pb2.GenerateRequest:
    """A greedy request of these lengths that does not stop at end tokens."""
    return request(prompt(num_prompt_tokens, salt), max_tokens=max_tokens, **fields)


def ids_of(message: router_pb2.GenerateRequest) -> list[int]:
    """The prompt of a request made of ids."""
    return list(message.token_ids.ids)

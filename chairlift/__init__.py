"""The command line and the client library: what people type, and what they import.

    import chairlift

    with chairlift.Client("127.0.0.1:50051") as client:
        print(client.chat("What is the capital of France?").text)

It knows the contract and rpc. Services are started as processes, never imported. Importing it is quick: gRPC
is loaded when a name of the library is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chairlift.client import AsyncClient, AsyncStream, Client, Stream
    from chairlift.results import (
        Answer,
        ChairliftError,
        Choice,
        FinishReason,
        Message,
        Model,
        Piece,
        TokenLogprobs,
        ToolCall,
        Usage,
    )

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "ChairliftError",
    "Choice",
    "Client",
    "FinishReason",
    "Message",
    "Model",
    "Piece",
    "Stream",
    "TokenLogprobs",
    "ToolCall",
    "Usage",
]

_IN_CLIENT = ("AsyncClient", "AsyncStream", "Client", "Stream")


if not TYPE_CHECKING:  # a type checker would believe that every name is there, misspelt ones too

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module("chairlift.client" if name in _IN_CLIENT else "chairlift.results")
        return getattr(module, name)

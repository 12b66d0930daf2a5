"""GGUF files with a tokenizer and no weights, written for the tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf


def write(path: Path, metadata: dict[str, Any], *, architecture: str = "llama") -> Path:
    """Write `metadata`; the kind of each value follows its Python type."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level(tokens: Sequence[str], merges: Sequence[str], *, pre: str, **more: Any) -> dict[str, Any]:
    """Metadata of a byte-level tokenizer; a token in angle brackets with bars is a control token."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": [3 if token.startswith("<|") else 1 for token in tokens],
        "tokenizer.ggml.merges": list(merges),
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def sentencepiece(pieces: dict[str, float], **more: Any) -> dict[str, Any]:
    """Metadata of a sentencepiece tokenizer: control and byte tokens as in Llama 2, then `pieces`, scored."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}

#!/usr/bin/env python3
"""Makes docs/api.md from the comments in `protos/v1/*.proto`; with `--check` says whether it is stale.

The contract's comments are the reference: this only puts them on a page.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
# In the order of a reader: the clients' door first.
FILES = ("router", "common", "scheduler", "executor")
HEAD = """# API reference

Package `chairlift.v1`. Made from the comments in [`protos/v1`](../protos/v1) by `scripts/gen_api_docs.py`;
change them there. How to use it: [clients.md](clients.md) for clients, [protocol.md](protocol.md) for
executors.
"""

Comments = dict[tuple[int, ...], str]
# Numbers of fields in descriptor.proto, which paths of comments are made of.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS = _VALUES = _METHODS = 2


def descriptors() -> list[FileDescriptorProto]:
    """The files of the contract, comments included, in the order of FILES."""
    names = [f"protos/v1/{name}.proto" for name in FILES]
    with tempfile.NamedTemporaryFile() as out:
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", "--include_source_info"]
        subprocess.run([*command, f"--descriptor_set_out={out.name}", *names], check=True, cwd=ROOT)
        files = {file.name: file for file in FileDescriptorSet.FromString(Path(out.name).read_bytes()).file}
    return [files[name] for name in names]


def page(files: list[FileDescriptorProto]) -> str:
    """The whole page."""
    parts = [HEAD]
    for file in files:
        comments = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}
        parts.append(f"\n## {file.name}\n\n[Source](../{file.name})\n")
        for i, service in enumerate(file.service):
            parts += _service(service, comments, (_SERVICES, i))
        for i, message in enumerate(file.message_type):
            parts += _message(message, comments, (_MESSAGES, i))
        for i, enum in enumerate(file.enum_type):
            parts += _enum(enum, comments, (_ENUMS, i))
    return "".join(parts)


def _service(service: ServiceDescriptorProto, comments: Comments, path: tuple[int, ...]) -> Iterator[str]:
    yield f"\n### service {service.name}\n\n{_prose(comments, path)}\n"
    yield "\n| RPC | takes | gives | |\n|---|---|---|---|\n"
    for i, method in enumerate(service.method):
        takes = ("stream " if method.client_streaming else "") + _link(method.input_type)
        gives = ("stream " if method.server_streaming else "") + _link(method.output_type)
        yield f"| `{method.name}` | {takes} | {gives} | {_cell(comments, (*path, _METHODS, i))} |\n"


def _message(message: DescriptorProto, comments: Comments, path: tuple[int, ...]) -> Iterator[str]:
    yield f"\n### {message.name}\n\n{_prose(comments, path)}\n"
    if message.field:
        yield "\n| field | type | |\n|---|---|---|\n"
    for i, field in enumerate(message.field):
        note = _cell(comments, (*path, _FIELDS, i))
        if field.HasField("oneof_index") and not field.proto3_optional:
            oneof = message.oneof_decl[field.oneof_index].name
            note = f"*one of `{oneof}`*: {note}"
        yield f"| `{field.name}` = {field.number} | {_type(field, message)} | {note} |\n"


def _enum(enum: EnumDescriptorProto, comments: Comments, path: tuple[int, ...]) -> Iterator[str]:
    yield f"\n### {enum.name}\n\n{_prose(comments, path)}\n\n| value | |\n|---|---|\n"
    for i, value in enumerate(enum.value):
        yield f"| `{value.name}` = {value.number} | {_cell(comments, (*path, _VALUES, i))} |\n"


def _type(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    nested = {f".chairlift.v1.{message.name}.{one.name}": one for one in message.nested_type}
    if field.type_name in nested:  # the only nested messages are entries of maps
        key, value = nested[field.type_name].field
        return f"map of {_scalar(key)} to {_scalar(value)}"
    name = _link(field.type_name) if field.type_name else _scalar(field)
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    return f"optional {name}" if field.proto3_optional else name


def _scalar(field: FieldDescriptorProto) -> str:
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _link(type_name: str) -> str:
    name = type_name.removeprefix(".chairlift.v1.")
    return f"[{name}](#{name.lower()})"


def _lines(comments: Comments, path: tuple[int, ...]) -> list[str]:
    return [line.removeprefix(" ").rstrip() for line in comments.get(path, "").rstrip("\n").splitlines()]


def _prose(comments: Comments, path: tuple[int, ...]) -> str:
    return "\n".join(_lines(comments, path))


def _cell(comments: Comments, path: tuple[int, ...]) -> str:
    return " ".join(" ".join(_lines(comments, path)).split()).replace("|", "\\|")


def main() -> int:
    """Writes the page, or checks it; returns the exit code."""
    text = page(descriptors())
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text)
        return 0
    if PAGE.exists() and PAGE.read_text() == text:
        return 0
    print("docs/api.md is stale, run scripts/gen_api_docs.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())

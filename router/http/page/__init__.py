"""The live page: what a browser loads, served from memory as it lies beside this file.

No build step, and nothing from elsewhere: the page may load and ask this router alone, and says so in its
Content-Security-Policy.
"""

from hashlib import sha256
from importlib import resources
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


def routes() -> list[Route]:
    """`/` and everything that it loads, under `/page/`."""
    files = [item for item in resources.files(__name__).iterdir() if item.name.rpartition(".")[2] in _TYPES]
    by_name = {item.name: item.read_bytes() for item in files}
    return [
        Route("/", _File("index.html", by_name["index.html"]), methods=["GET"]),
        *(Route(f"/page/{name}", _File(name, body), methods=["GET"]) for name, body in by_name.items()),
    ]


class _File:
    """One file; a browser that has it already is told so."""

    def __init__(self, name: str, body: bytes) -> None:
        self._body = body
        self._headers = {
            "content-type": _TYPES[name.rpartition(".")[2]],
            "content-security-policy": _POLICY,
            "cache-control": "no-cache",
            "etag": f'"{sha256(body).hexdigest()[:32]}"',
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = Response(self._body, headers=self._headers)
        if Request(scope).headers.get("if-none-match") == self._headers["etag"]:
            response = Response(status_code=304, headers=self._headers)
        await response(scope, receive, send)

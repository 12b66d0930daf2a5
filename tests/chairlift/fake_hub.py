"""A small Hugging Face hub on this machine: what its library asks of one to fetch a repository."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serving(repository: str, files: dict[str, bytes]) -> Iterator[str]:
    """A hub with one repository; its address."""

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(with_body=True)

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def answer(self, *, with_body: bool) -> None:
            path = self.path.split("?", maxsplit=1)[0]
            file = path.removeprefix(f"/{repository}/resolve/").partition("/")[2]
            listing = [{"type": "file", "path": name, "size": len(files[name]), "oid": "0"} for name in files]
            if path.startswith(f"/api/models/{repository}/tree/"):
                self.send(listing, with_body=with_body)
            elif path.startswith(f"/api/models/{repository}"):
                siblings = [{"rfilename": name} for name in files]
                info = {"id": repository, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
                self.send(info, with_body=with_body)
            elif file in files:
                self.send(files[file], with_body=with_body)
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def send(self, content: Any, *, with_body: bool) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

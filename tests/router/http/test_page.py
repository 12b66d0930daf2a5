import re
from importlib import resources

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from router.http import page


@pytest.fixture
def client() -> TestClient:
    return TestClient(Starlette(routes=page.routes()))


def test_everything_the_page_loads_is_there(client: TestClient) -> None:
    seen, queue = set(), ["/"]
    while queue:
        path = queue.pop()
        seen.add(path)
        response = client.get(path)
        assert response.status_code == 200, path
        loads = re.findall(r'(?:href|src)="(/[^"]*)"', response.text)
        loads += [f"/page/{name}" for name in re.findall(r'from "\./([^"]+)"', response.text)]
        queue += [one for one in loads if one not in seen]
    files = {path.rpartition("/")[2] for path in seen}
    assert files >= {"page.css", "page.js", "lift.js", "story.js", "ride.js", "calls.js"}


def test_the_page_may_load_and_ask_its_own_router_alone(client: TestClient) -> None:
    policy = client.get("/").headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for item in resources.files(page).iterdir():
        if item.name.endswith((".html", ".css", ".js")):
            elsewhere = re.findall(r"https?://[^\s\"']+", item.read_text(encoding="utf-8"))
            assert not elsewhere, item.name


def test_a_browser_that_has_a_file_is_told_so(client: TestClient) -> None:
    tag = client.get("/page/page.js").headers["etag"]
    again = client.get("/page/page.js", headers={"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/page/page.js", headers={"if-none-match": '"other"'}).status_code == 200

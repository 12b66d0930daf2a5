import sys

import pytest

from router import __main__ as main
from router.config import RouterSettings
from rpc.errors import StartError
from tests.router.stack import Start

SETTINGS = RouterSettings.model_construct(http="127.0.0.1:0", max_message_bytes=1024)


async def test_without_its_libraries_the_door_says_what_brings_them(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start() as rig:
        main._http_door(rig.intake, rig.pool, SETTINGS)
        monkeypatch.delitem(sys.modules, "router.http.server")
        monkeypatch.setitem(sys.modules, "uvicorn", None)
        with pytest.raises(StartError, match=r"\(uvicorn\); `pip install 'chairlift\[router,http\]'`"):
            main._http_door(rig.intake, rig.pool, SETTINGS)


async def test_a_door_that_never_opened_stops_without_a_word(start: Start) -> None:
    async with start() as rig:
        await main._http_door(rig.intake, rig.pool, SETTINGS).stop()

"""Keeps track of the executors there are: those listed, and all addresses that a dns:/// name now has."""

import asyncio
import socket
from collections.abc import Callable

from rpc.address import Address
from scheduler.executor_loop import ExecutorLoop

RESOLVE_SECONDS = 1.0


class ExecutorDirectory:
    """Runs one loop for each executor."""

    def __init__(self, addresses: list[Address], make_loop: Callable[[Address], ExecutorLoop]) -> None:
        self._addresses = addresses
        self._make_loop = make_loop
        self._loops: dict[str, ExecutorLoop] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Runs until cancelled, or until one of the loops fails."""
        try:
            while True:
                await self._look()
                if self._tasks:
                    done, _ = await asyncio.wait(self._tasks.values(), timeout=RESOLVE_SECONDS)
                    for task in done:
                        task.result()
                else:
                    await asyncio.sleep(RESOLVE_SECONDS)
        finally:
            await self._end(list(self._tasks))

    async def _look(self) -> None:
        answers = [await _resolved(address) for address in self._addresses]
        found = {str(address): address for answer in answers for address in answer or []}
        for executor_id, address in found.items():
            if executor_id not in self._tasks:
                self._loops[executor_id] = self._make_loop(address)
                self._tasks[executor_id] = asyncio.create_task(self._loops[executor_id].run())
        if None not in answers:
            # An executor that is both lost and gone from its name will not come back under this address.
            await self._end(
                [name for name, loop in self._loops.items() if name not in found and not loop.is_attached]
            )

    async def _end(self, executor_ids: list[str]) -> None:
        tasks = [self._tasks.pop(executor_id) for executor_id in executor_ids]
        for executor_id, task in zip(executor_ids, tasks, strict=True):
            del self._loops[executor_id]
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _resolved(address: Address) -> list[Address] | None:
    """All addresses behind dns:///NAME:PORT, or None if unknown now; other addresses are kept as is."""
    name, separator, port = address.target.removeprefix("dns:///").rpartition(":")
    if not address.target.startswith("dns:///") or not separator:
        return [address]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    hosts = sorted({str(item[4][0]) for item in found})
    return [
        Address.parse(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", field="--executor")
        for host in hosts
    ]

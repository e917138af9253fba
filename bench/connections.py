from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from hearth_client import AsyncClient


@asynccontextmanager
async def connected(socket: Path | str, count: int) -> AsyncIterator[list[AsyncClient]]:
    """`count` clients of the daemon at `socket`, each with a connection of its own."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(AsyncClient(socket)) for _ in range(count)]

"""Bench of ../conformance/BENCH.md; with `--asyncio` of the asyncio client."""

import sys

from hearth.bench.clients.measure import SIDE, MeasuredSession, print_figures
from hearth_client import AsyncClient, Client, Image

PROMPT = "Once upon a time"


class Blocking(MeasuredSession):
    """A session of `Client`."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def status(self) -> None:
        """See the base."""
        self.client.status()

    async def stream(self, max_tokens: int) -> int:
        """See the base."""
        return sum(1 for _ in self.client.generate(PROMPT, max_tokens=max_tokens, ignore_eos=True))

    async def picture(self, pixels: bytes) -> None:
        """See the base."""
        self.client.generate(messages=turns(pixels), max_tokens=1).result()

    async def close(self) -> None:
        """See the base."""
        self.client.close()


class Asyncio(MeasuredSession):
    """A session of `AsyncClient`."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client

    async def status(self) -> None:
        """See the base."""
        await self.client.status()

    async def stream(self, max_tokens: int) -> int:
        """See the base."""
        deltas = 0
        async for _ in await self.client.generate(PROMPT, max_tokens=max_tokens, ignore_eos=True):
            deltas += 1
        return deltas

    async def picture(self, pixels: bytes) -> None:
        """See the base."""
        await (await self.client.generate(messages=turns(pixels), max_tokens=1)).result()

    async def close(self) -> None:
        """See the base."""
        await self.client.close()


def turns(pixels: bytes) -> list[dict[str, object]]:
    """A conversation of one picture."""
    image = Image(pixels, "rgba8", width=SIDE, height=SIDE)
    return [{"role": "user", "content": [image]}]


async def connect() -> MeasuredSession:
    """Open a session of the client that was asked for."""
    if "--asyncio" in sys.argv:
        client = AsyncClient(sys.argv[-1])
        await client.connect()
        return Asyncio(client)
    blocking = Client(sys.argv[-1])
    blocking.connect()
    return Blocking(blocking)


if __name__ == "__main__":
    print_figures(connect)

"""Bench of ../conformance/BENCH.md; with `--asyncio` of the asyncio client."""

import sys

from hearth.bench.clients.measure import PROMPT, SIDE, TOKENS, MeasuredSession, print_figures
from hearth_client import AsyncClient, Client, Image


def turns(pixels: bytes) -> list[dict[str, object]]:
    """A conversation of one picture."""
    image = Image(pixels, "rgba8", width=SIDE, height=SIDE)
    return [{"role": "user", "content": [image]}]


async def blocking() -> MeasuredSession:
    """A session of `Client`."""
    client = Client(sys.argv[-1])

    async def status() -> None:
        client.status()

    async def stream() -> int:
        return sum(1 for _ in client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True))

    async def picture(pixels: bytes) -> None:
        client.generate(messages=turns(pixels), max_tokens=1).result()

    async def close() -> None:
        client.close()

    return MeasuredSession(status, stream, picture, close)


async def by_asyncio() -> MeasuredSession:
    """A session of `AsyncClient`."""
    client = AsyncClient(sys.argv[-1])

    async def stream() -> int:
        deltas = 0
        async for _ in await client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True):
            deltas += 1
        return deltas

    async def picture(pixels: bytes) -> None:
        await (await client.generate(messages=turns(pixels), max_tokens=1)).result()

    return MeasuredSession(client.status, stream, picture, client.close)


if __name__ == "__main__":
    print_figures(by_asyncio if "--asyncio" in sys.argv else blocking)

"""Sessions with the daemon: one for each key, one for all programs without."""

import os

from hearth_client import FEATURES, AsyncClient
from hearth_http.keys import Key

_FEATURES = (*FEATURES, "generation_defaults", "token_bytes")


class Sessions:
    """Clients of one daemon, each made when it is first asked for.

    The daemon shares its places by session, so each key has a share of its own.
    """

    def __init__(self, address: str | os.PathLike[str] | None) -> None:
        self._address = address
        self._clients: dict[str, AsyncClient] = {}

    def of(self, key: Key | None) -> AsyncClient:
        """The client of a key, or of all without one; it connects by itself, also after a loss."""
        name = key.name if key else ""
        if name not in self._clients:
            told = f"hearth-http {name}".strip()
            self._clients[name] = AsyncClient(self._address, name=told, features=_FEATURES)
        return self._clients[name]

    async def close(self) -> None:
        """End all sessions, and with them all that runs."""
        for client in self._clients.values():
            await client.close()

"""The application: routes, who may ask, health, figures and the page."""

import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hearth_client import FEATURES, AsyncClient
from hearth_client.errors import HearthClientError
from hearth_http import ollama
from hearth_http.errors import (
    FORBIDDEN,
    INTERNAL,
    NOT_FOUND,
    UNAUTHORIZED,
    UNAVAILABLE,
    ApiError,
)
from hearth_http.exchange import Bodies, Call, ClientLeftError
from hearth_http.fields import Fields, decode
from hearth_http.keys import Key, key_of
from hearth_http.openai.chat import chat
from hearth_http.openai.completions import completions, models, tokenize

_OPEN = {"/", "/health"}
"""Paths that need no key: neither says anything of what was asked."""
_BEARER = re.compile(r"bearer +(\S+) *", re.IGNORECASE)
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]*)(:\d{1,5})?", re.IGNORECASE)
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})

_FEATURES = (*FEATURES, "generation_defaults", "token_bytes")
Handler = Callable[[Call], Awaitable[Response]]
POST: Mapping[str, Handler] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/tokenize": tokenize,
    "/api/chat": ollama.chat,
    "/api/generate": ollama.generate,
    "/api/show": ollama.show,
}
GET: Mapping[str, Handler] = {
    "/v1/models": models,
    "/api/tags": ollama.tags,
    "/api/version": ollama.version,
}


@dataclass
class Admission:
    """Rules for who may ask.

    `hosts` are names that `Host` may have, None for any; `origins` are those of foreign pages.
    `keys` is None where nobody needs one. It is looked up at each request, and may be changed.
    """

    hosts: frozenset[str] | None = LOCAL_NAMES
    origins: Sequence[str] = ()
    keys: dict[str, Key] | None = None

    def check(self, request: Request) -> Key | None:
        """The key of a request; raises ApiError where it may not ask."""
        host = _HOST.fullmatch(request.headers.get("host", ""))
        if self.hosts is not None and (host is None or host[1].lower() not in self.hosts):
            # A page of any name may have this machine's address.
            text = "this is no name of this server: allow it by --allow-host"
            raise ApiError(FORBIDDEN, "not_allowed", text, "Host")
        origin = request.headers.get("origin")
        own = f"{request.url.scheme}://{request.headers.get('host', '')}"
        if origin is not None and origin != own and origin not in self.origins:
            text = "pages of other origins may not ask here: allow one by --allow-origin"
            raise ApiError(FORBIDDEN, "not_allowed", text, "Origin")
        if self.keys is None or request.url.path in _OPEN:
            return None
        shown = _BEARER.fullmatch(request.headers.get("authorization", ""))
        key = key_of(self.keys, shown[1]) if shown else None
        if key is None:
            text = "this key is not listed here" if shown else "a key is needed: Bearer KEY"
            raise ApiError(UNAUTHORIZED, "invalid_api_key", text, "Authorization")
        return key


class Sessions:
    """Clients of one daemon, each made when it is first asked for.

    Each key has a share of its own, as the daemon shares by session. `status` has a place always.
    """

    def __init__(self, address: str | os.PathLike[str] | None) -> None:
        self._address = address
        self.status = AsyncClient(address, name="hearth-http", status_only=True)
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
        for client in [self.status, *self._clients.values()]:
            await client.close()


class Door:
    """The routes, and what they share."""

    def __init__(self, sessions: Sessions, admission: Admission, bodies: Bodies) -> None:
        self._sessions, self._admission, self._bodies = sessions, admission, bodies
        self._answered: Counter[tuple[str, int]] = Counter()
        self._open = 0
        self._paths = {"/", "/health", "/metrics", *POST, *GET}

    def app(self) -> ASGIApp:
        """The application."""
        routes = [Route(path, self._answering(one), methods=["POST"]) for path, one in POST.items()]
        routes += [Route(path, self._answering(one), methods=["GET"]) for path, one in GET.items()]
        routes += [Route("/", self._page), Route("/health", self._health)]
        routes += [Route("/metrics", self._metrics)]
        origins = list(self._admission.origins)
        cors = Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
        app = Starlette(
            routes=routes,
            middleware=[cors] if origins else [],
            exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), _told),
        )
        # A redirect would lead to whatever `Host` says.
        app.router.redirect_slashes = False
        return self._counting(app)

    def _counting(self, app: ASGIApp) -> ASGIApp:
        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            path = scope["path"] if scope["path"] in self._paths else "other"

            async def noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self._answered[path, message["status"]] += 1
                await send(message)

            self._open += 1
            try:
                await app(scope, receive, noted)
            except ClientLeftError:
                pass
            finally:
                self._open -= 1

        return counted

    def _answering(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            key = self._admission.check(request)
            fields = Fields({})
            if request.method == "POST":
                fields = decode(await self._bodies.read(request))
            client = self._sessions.of(key)
            salt = key.cache_salt if key else ""
            return await handler(Call(fields, client, salt, request.receive))

        return answer

    async def _page(self, request: Request) -> Response:
        self._admission.check(request)
        page = resources.files("hearth_http") / "page.html"
        return HTMLResponse(page.read_text(encoding="utf-8"))

    async def _health(self, request: Request) -> Response:
        self._admission.check(request)
        try:
            state = (await self._sessions.status.status()).state
        except HearthClientError as error:
            return JSONResponse({"status": "unreachable", "reason": error.message}, UNAVAILABLE)
        return JSONResponse({"status": state}, 200 if state == "ready" else UNAVAILABLE)

    async def _metrics(self, request: Request) -> Response:
        self._admission.check(request)
        name = "hearth_http_requests_total"
        lines = [f"# TYPE {name} counter"]
        for (path, status), count in sorted(self._answered.items()):
            lines.append(f'{name}{{path="{path}",status="{status}"}} {count}')
        lines += ["# TYPE hearth_http_open gauge", f"hearth_http_open {self._open}", ""]
        return PlainTextResponse("\n".join(lines), media_type="text/plain; version=0.0.4")


async def _told(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        known = error.status_code != NOT_FOUND
        text = f"{request.method} is not for this path" if known else "there is nothing here"
        code = "method_not_allowed" if known else "not_found"
        error = ApiError(error.status_code, code, text)
    elif not isinstance(error, ApiError):
        text = "a fault of this server, which its log shows"
        error = ApiError(INTERNAL, "internal", text, again=False)
    body = error.ollama if request.url.path.startswith("/api/") else error.openai
    return JSONResponse(body, error.status, headers=error.headers)

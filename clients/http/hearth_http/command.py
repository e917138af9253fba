"""The command `hearth-http`: serve, and keep keys."""

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hearth_client.errors import HearthClientError
from hearth_http.app import LOCAL_NAMES, Admission, Door, Sessions
from hearth_http.exchange import Bodies
from hearth_http.keys import KeysInvalid, add_key, read_keys, remove_key
from hearth_http.server import Server

_FAILED = 1
_SERVE = "serve"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 done, 1 failed, 2 wrong usage."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # `hearth-http --port 8080` serves: what it mostly does needs no word.
    if not given or given[0].startswith("-"):
        given = [_SERVE, *given]
    parser = _parser()
    options = parser.parse_args(given)
    if options.command == _SERVE:
        if options.keys is None and not _is_local(options.host):
            parser.error(f"{options.host} is open to other machines: give --keys")
        if not 0 <= options.port < 1 << 16:
            parser.error("a port is a number from 0 to 65535")
    try:
        if options.command == _SERVE:
            _serve(options)
        elif options.command == "add":
            print(add_key(options.keys, options.name))  # noqa: T201 - what the command is for
        else:
            remove_key(options.keys, options.name)
    except (KeysInvalid, HearthClientError) as error:
        return _fail(str(error))
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _fail(f"{place}{error.strerror or error}")
    return 0


def _fail(text: str) -> int:
    print(f"hearth-http: {text}", file=sys.stderr)  # noqa: T201 - a command's failure
    return _FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hearth-http",
        description="Serve OpenAI's and Ollama's API over HTTP, before a Hearth daemon.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser(
        _SERVE,
        help="serve; the command where none is named",
        description=parser.description,
        epilog="Other commands: add and remove, for keys (hearth-http add --help).",
    )
    serve.add_argument("--socket", metavar="PATH", help="the daemon's, else the agreed place")
    place = serve.add_mutually_exclusive_group()
    place.add_argument("--port", type=int, default=8080, help="0 takes a free one; default 8080")
    place.add_argument("--unix", metavar="PATH", type=Path, help="a unix socket in place of a port")
    serve.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1")
    serve.add_argument("--keys", metavar="FILE", type=Path, help="keys, of which one is needed")
    serve.add_argument(
        "--allow-host", metavar="NAME", action="append", default=[], help="a further name in Host"
    )
    serve.add_argument(
        "--allow-origin",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="an origin whose pages may ask (CORS)",
    )
    serve.add_argument("--connections", type=_count, default=256, help="at a time; default 256")
    serve.add_argument("--body-mib", type=_count, default=32, help="of a body; default 32")
    serve.add_argument("--drain-s", type=float, default=10.0, help="for what is open at the end")
    for name, text in (("add", "draw a key and show it"), ("remove", "take a key off the list")):
        keys = commands.add_parser(name, help=text)
        keys.add_argument("name", help="whose key it is")
        keys.add_argument("--keys", metavar="FILE", type=Path, required=True)
    return parser


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise ValueError
    return count


def _serve(options: argparse.Namespace) -> None:
    admission = Admission(origins=options.allow_origin)
    if options.keys is not None:
        admission.keys = read_keys(options.keys)
    if options.unix is not None:
        # No page reaches a unix socket, whatever name it has.
        admission.hosts = None
        listener, told = _listen_unix(options.unix), f"unix:{options.unix}"
    else:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listener = socket.create_server((options.host, options.port), family=family)
        names = {options.host.lower(), *(name.lower() for name in options.allow_host)}
        admission.hosts = LOCAL_NAMES | names
        told = _url(listener)
    bodies = Bodies(options.body_mib << 20, 4 * options.body_mib << 20)
    sessions = Sessions(options.socket)
    server = Server(Door(sessions, admission, bodies).app(), options.connections, options.drain_s)

    def reread() -> None:
        try:
            admission.keys = options.keys and read_keys(options.keys)
        except KeysInvalid as error:
            # Those from before still hold.
            _fail(str(error))

    async def run() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reread)
        ready = partial(print, f"listening at {told}", flush=True)
        await server.run(listener, ready, sessions.close)

    asyncio.run(run())


def _listen_unix(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o117)
    try:
        if path.is_socket():
            # Left by one that was killed.
            path.unlink()
        listener.bind(os.fspath(path))
    finally:
        os.umask(mask)
    listener.listen()
    return listener


def _is_local(host: str) -> bool:
    return host in {"localhost", "::1"} or host.startswith("127.")


def _url(listener: socket.socket) -> str:
    host, port, *_ = listener.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

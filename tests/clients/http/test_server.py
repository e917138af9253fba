import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from hearth_http.keys import add_key
from tests.clients.http.conftest import openai_client, serving
from tests.daemon.door.harness import Harness, until

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {
    "model": "toy",
    "messages": [{"role": "user", "content": "count"}],
    "max_tokens": 2,
}


@pytest.fixture
def bounded(actors: Harness) -> Iterator[str]:
    with serving(actors.path, "--body-mib", "1", "--connections", "2") as url:
        yield url


def connected(url: str) -> socket.socket:
    place = urlsplit(url)
    return socket.create_connection((place.hostname, place.port or 80), timeout=20)


def hanging() -> bytes:
    body = json.dumps({**ASKED, "messages": [{"role": "user", "content": "hang"}]})
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1]",
        b"{",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"messages": ' + b"[" * 100_000,
        b'{"seed": 1e999}',
        b'{"stop": [' + b"0," * 600_000 + b"0]}",
    ],
    ids=["none", "list", "cut", "utf-8", "surrogate", "deep", "infinite", "many"],
)
def test_a_body_that_is_no_object(door: str, body: bytes) -> None:
    assert code(httpx.post(door + CHAT, content=body)) == (400, "bad_message")
    assert httpx.post(door + CHAT, json=ASKED).status_code == 200


def test_a_body_that_is_too_large(bounded: str) -> None:
    answer = httpx.post(bounded + CHAT, content=b"{" * (2 << 20))
    assert code(answer) == (413, "message_too_large")
    # A message of the daemon's is smaller still.
    text = {**ASKED, "messages": [{"role": "user", "content": "x" * (1 << 20)}]}
    assert code(httpx.post(bounded + CHAT, json=text)) == (413, "message_too_large")


@pytest.mark.timeout(60)
def test_a_half_sent_header_and_one_without_end(bounded: str) -> None:
    with connected(bounded) as slow, connected(bounded) as endless:
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: loc")
        with pytest.raises(OSError, match=r"reset|pipe"):
            endless.sendall(b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 5_000_000)
        assert slow.recv(1) == b""


def test_one_connection_too_many(bounded: str) -> None:
    with connected(bounded), connected(bounded), connected(bounded) as third:
        answer = third.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_clients"


def test_connections_that_have_ended_do_not_count(bounded: str) -> None:
    with connected(bounded), connected(bounded):
        assert httpx.get(bounded).status_code == 503
    # Sooner than idle ones are closed.
    until(lambda: httpx.get(bounded).status_code == 200, 3)


def test_a_body_whose_sender_leaves(door: str, actors: Harness) -> None:
    with connected(door) as leaving:
        leaving.sendall(hanging()[:-1])
    assert httpx.post(door + CHAT, json=ASKED).status_code == 200
    assert len(actors.actors.prepared) == 1


def test_who_leaves_behind_a_request_that_waits(door: str, actors: Harness) -> None:
    with connected(door) as leaving:
        leaving.sendall(hanging() + b"GET /health HTTP/1.1\r\n")
        until(lambda: actors.actors.prepared)
    until(lambda: actors.actors.cancelled)


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ({"host": "evil.example"}, "Host"),
        ({"host": "127.0.0.1.evil.example:80"}, "Host"),
        ({"origin": "http://evil.example"}, "Origin"),
        ({"origin": "null"}, "Origin"),
    ],
)
@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/v1/models"])
def test_pages_of_others(door: str, headers: dict[str, str], field: str, path: str) -> None:
    answer = httpx.get(door + path, headers=headers)
    assert code(answer) == (403, "not_allowed")
    assert answer.json()["error"]["param"] == field


def test_an_origin_that_is_allowed(actors: Harness) -> None:
    with serving(actors.path, "--allow-origin", "http://own.example") as url:
        origin = {"origin": "http://own.example"}
        asking = {"access-control-request-method": "POST"}
        asked = httpx.options(url + CHAT, headers={**origin, **asking})
        assert asked.headers["access-control-allow-origin"] == "http://own.example"
        told = httpx.post(url + CHAT, json=ASKED, headers=origin)
    assert told.headers["access-control-allow-origin"] == "http://own.example"


def test_keys_have_sessions_and_caches_of_their_own(actors: Harness, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    one, other = add_key(file, "one"), add_key(file, "other")
    with serving(actors.path, "--keys", str(file)) as url:
        assert code(httpx.get(f"{url}/v1/models")) == (401, "invalid_api_key")
        with openai_client(url, "hearth-wrong") as wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()
        for key in (one, other, one):
            answer = httpx.post(url + CHAT, json=ASKED, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
        salts = [asked.options.cache_salt for asked in actors.actors.prepared]
        assert salts[0] == salts[2] != salts[1]
        assert "" not in salts
        assert actors.sessions() == 2
        # Neither needs a key, and neither says anything of what was asked.
        assert httpx.get(f"{url}/health").json() == {"status": "ready"}
        assert httpx.get(url).status_code == 200
        assert httpx.get(f"{url}/metrics").status_code == 401


def test_a_unix_socket(actors: Harness, short_folder: Path) -> None:
    path = short_folder / "http"
    with serving(actors.path, "--unix", str(path)):
        assert path.stat().st_mode & 0o777 == 0o660
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://any.name") as client:
            assert client.post(CHAT, json=ASKED).status_code == 200


def test_figures_and_what_is_not_there(door: str) -> None:
    assert code(httpx.get(f"{door}/nothing")) == (404, "not_found")
    assert code(httpx.get(door + CHAT)) == (405, "method_not_allowed")
    httpx.post(door + CHAT, json=ASKED)
    lines = httpx.get(f"{door}/metrics").text.splitlines()
    assert f'hearth_http_requests_total{{path="{CHAT}",status="200"}} 1' in lines
    assert 'hearth_http_requests_total{path="other",status="404"} 1' in lines


def test_a_daemon_that_is_not_there(tmp_path: Path) -> None:
    with serving(tmp_path / "none") as url:
        answer = httpx.post(url + CHAT, json=ASKED)
        assert code(answer) == (503, "connection_refused")
        assert answer.headers["retry-after"] == "1"
        assert httpx.get(f"{url}/health").status_code == 503


def test_what_runs_is_answered_before_the_door_ends(actors: Harness) -> None:
    with ExitStack() as stack:
        url = stack.enter_context(serving(actors.path, "--drain-s", "0"))
        waiting = connected(url)
        waiting.sendall(hanging())
        until(lambda: actors.actors.prepared)
    with waiting:
        answer = waiting.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "shutting_down"
    until(lambda: not actors.sessions())

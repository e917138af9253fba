"""Rows about whose a connection is: names that peers give themselves, and keys that are removed."""

import ctypes
import socket
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path

from hearth.daemon.control.client import ask
from hearth.daemon.control.messages import Reload, Reloaded
from hearth.daemon.door.keys import add_client, make_server_keys, remove_client
from hearth_client.keys import client_keys
from tests.system.faults.raw_peer import connected_peer, has_ended
from tests.system.faults.trial import Trial, seconds_since
from tests.system.faults.wire_client import WireClient

_PROMPT = "the lamp is on"
_GUESSES = 4
_NAMED = 40
_UNNAMED = 60
_QUIET_S = 0.5
_PLACE_FREE_S = 1.0


def same_identity(trial: Trial) -> None:
    """A second connection takes the identity of one that has a reply under way, and a third."""
    daemon = trial.shared()
    with trial.client(daemon, identity=b"twin") as first:
        reply = first.generate(_PROMPT, max_tokens=60)
        first.wait_for_deltas(reply)
        with trial.client(daemon, identity=b"twin") as second:
            own = second.generate(_PROMPT, max_tokens=4)
            first.end(reply)
            trial.expect("second_is_served", second.outcome(own), "length")
            second.listen(_QUIET_S)
            trial.expect("answers_stolen", len(_strange(second, own)), 0)
        trial.expect("tokens", len(first.tokens(reply)), 60)
    with trial.client(daemon, identity=b"twin") as again:
        trial.expect("then", again.outcome(again.generate(_PROMPT, max_tokens=4)), "length")


def raw_identity(trial: Trial) -> None:
    """Peers that call themselves as libzmq would call the next connections, which ends libzmq."""
    daemon = trial.shared()
    # glibc's numbers where nobody gives a seed: libzmq takes the first for its own count.
    library = ctypes.CDLL(None)
    library.srand(1)
    first = [library.rand() for _ in range(_GUESSES)]
    with trial.client(daemon) as client, ExitStack() as stack:
        alone = client.generate(_PROMPT, max_tokens=100)
        client.end(alone)
        beside = client.generate(_PROMPT, max_tokens=100)
        peers = []
        for guess in first:
            for number in range(_NAMED + _UNNAMED):
                claimed = b"\0" + ((guess + number) % (1 << 32)).to_bytes(4, "big")
                named = claimed if number < _NAMED else b""
                peers.append(stack.enter_context(connected_peer(daemon.socket, named)))
        trial.measured["connections"] = len(peers)
        client.end(beside)
        trial.same_tokens(client, beside, alone)
        trial.expect("daemon_runs", daemon.runs, wanted=True)
        trial.measured["closed_for_newer_ones"] = sum(map(has_ended, peers))
        with trial.client(daemon) as later:
            trial.expect("then", later.outcome(later.generate(_PROMPT, max_tokens=4)), "length")


def taken_over(trial: Trial) -> None:
    """A client leaves while its request waits; others come with its identity, and guess."""
    with (
        trial.daemon("--max-batch", "1", "--hold-s", "3600") as daemon,
        trial.client(daemon) as busy,
    ):
        long = busy.generate(_PROMPT, max_tokens=100)
        busy.wait_for_deltas(long)
        with closing(WireClient(daemon.socket, identity=b"twin")) as victim:
            victim.first(victim.generate(_PROMPT, max_tokens=60))
        left = time.monotonic()
        busy.wait_for_status(lambda status: status["clients"] == 1)
        trial.at_most("place_free_s", seconds_since(left), _PLACE_FREE_S)
        with ExitStack() as stack:
            others = [
                stack.enter_context(closing(WireClient(daemon.socket, hello=False, identity=one)))
                for one in (b"twin", b"twin", b"other")
            ]
            for other in others:
                refused = other.ask("status")
                trial.expect("without_hello", refused.get("code"), "hello_required")
            busy.end(long)
            busy.end(busy.generate(_PROMPT, max_tokens=10))
            for other in others:
                other.listen(_QUIET_S)
            trial.expect("answers_stolen", sum(len(one.received) - 1 for one in others), 0)


def key_removed(trial: Trial) -> None:
    """Two keys on TCP: one takes the other's identity, and is removed while both have replies."""
    with tempfile.TemporaryDirectory(prefix="hearth-") as name:
        folder = Path(name)
        keys = folder / "keys"
        make_server_keys(keys)
        for key in ("kept", "removed"):
            add_client(keys, key, hand_over=folder / key)
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = unused.getsockname()[1]
        address = f"tcp://127.0.0.1:{port}"
        kept, removed = (client_keys(folder / one, None, {}) for one in ("kept", "removed"))
        with (
            trial.daemon("--tcp-port", str(port), "--keys", str(keys)) as daemon,
            trial.client(daemon, address=address, keys=kept) as stays,
            trial.client(daemon, address=address, keys=removed) as leaves,
        ):
            reply = stays.generate(_PROMPT, max_tokens=200)
            ended = leaves.generate(_PROMPT, max_tokens=200)
            for client, request_id in ((stays, reply), (leaves, ended)):
                client.wait_for_deltas(request_id)
            with closing(
                WireClient(daemon.socket, hello=False, address=address, keys=removed, identity=b"x")
            ) as named:
                answer = named.send_hello()
                trial.expect(
                    "with_an_identity", [answer.get("code"), answer.get("field")], _REFUSED
                )
            remove_client(keys, "removed")
            trial.expect("reloaded", ask(Reload(), Reloaded, str(daemon.socket)).changed, ["keys"])
            trial.expect("its_reply", leaves.outcome(ended), "not_allowed")
            leaves.listen(_QUIET_S)
            received = len(leaves.received)
            leaves.send({"t": "hello", "proto": [1]})
            leaves.send({"t": "status", "id": "s"})
            stays.end(reply)
            leaves.listen(_QUIET_S)
            trial.expect("heard_later", len(leaves.received) - received, 0)
            trial.expect("tokens_of_the_other", len(stays.tokens(reply)), 200)


_REFUSED = ["unsupported_option", "routing_id"]


def _strange(client: WireClient, *own: str) -> list[str]:
    """Ids of answers that a client did not ask for."""
    received = [str(one.answer.get("id", "")) for one in client.received]
    return [one for one in received if one and one not in own]

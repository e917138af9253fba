"""Rows about messages and requests that are wrong."""

import math
import random
import time
from contextlib import ExitStack, closing
from itertools import pairwise
from typing import Any

import msgspec

from hearth.bench.child_process import family_usage
from tests.system.faults.raw_peer import (
    connected_peer,
    connection,
    declare,
    has_ended,
    send_unfinished,
)
from tests.system.faults.trial import NotRunError, Trial, seconds_since
from tests.system.faults.wire_client import WireClient

PROMPT = "the lamp is on"
_CONNECTIONS = 400
_GROWTH_MB = 100.0
_MUTATIONS = 5_000
_SPECIAL = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "</s>")
_WRONG_FIELDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 1 << 40}),
    ("max_tokens", {"max_tokens": "4"}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": math.nan}),
    ("temperature", {"temperature": math.inf}),
    ("top_p", {"top_p": 0.0}),
    ("top_p", {"top_p": math.nan}),
    ("top_k", {"top_k": -1}),
    ("seed", {"seed": -1}),
    ("seed", {"seed": (1 << 64) - 1}),
    ("deadline_s", {"deadline_s": -1.0}),
    ("stop", {"stop": ["x"] * 10_000}),
    ("stop", {"stop": [""]}),
    ("logit_bias", {"logit_bias": [[-1, 0.0]]}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": 7}),
    ("prompt", {"prompt": ["a"]}),
    ("messages", {"prompt": None, "messages": []}),
)


def same_bad_request_twice(trial: Trial) -> None:
    """A request that asks for no token comes twice."""
    with trial.client(trial.shared()) as client:
        refusals = []
        for _ in range(2):
            answer = client.end(client.generate(PROMPT, max_tokens=0)).answer
            refusals.append([answer.get("code"), answer.get("field")])
        trial.expect("refusals", refusals, [["invalid_value", "max_tokens"]] * 2)
        trial.expect("then", client.outcome(client.generate(PROMPT, max_tokens=4)), "length")


def random_bytes(trial: Trial) -> None:
    """Hundreds of connections of random bytes, half a handshake, or the first ZeroMQ protocol."""
    daemon, chance = trial.shared(), random.Random(3)
    with trial.client(daemon) as client:
        alone = client.generate(PROMPT, max_tokens=100)
        client.end(alone)
        before = family_usage(daemon.pid).rss_bytes
        beside = client.generate(PROMPT, max_tokens=100)
        with ExitStack() as stack:
            silent, loud = [], []
            for number in range(_CONNECTIONS):
                peer = stack.enter_context(connection(daemon.socket))
                if not number % 10:
                    silent.append(peer)
                    continue
                # Every tenth says a frame of ZMTP 1.0.
                first = number % 10 == 1
                peer.send(b"\x01\x00\x04\x00abc" if first else chance.randbytes(4096))
                loud.append(peer)
            started = time.monotonic()
            client.end(beside)
            client.wait(lambda: all(map(has_ended, silent)))
            trial.measured["half_open_dropped_s"] = seconds_since(started)
            trial.expect("others_not_dropped", sum(not has_ended(peer) for peer in loud), 0)
            totals = client.ask("status").get("totals", {})
            trial.expect("internal_errors", totals.get("internal_errors", 0), 0)
        grown = family_usage(daemon.pid).rss_bytes - before
        trial.at_most("grown_mb", max(0, grown) / 1e6, _GROWTH_MB)
        trial.same_tokens(client, beside, alone)


def odd_frames(trial: Trial) -> None:
    """No frame, too many frames, empty ones, a gigabyte that is announced, and one too large."""
    daemon = trial.shared()
    with trial.client(daemon) as client:
        before = family_usage(daemon.pid).rss_bytes
        limit = client.limits["frame_bytes"]
        beside = client.generate(PROMPT, max_tokens=100)
        codes: dict[str, str] = {}
        good = {"t": "tokenize", "text": "a"}
        odd: dict[str, list[Any]] = {
            "empty": [b""],
            "two": [{**good, "id": "two"}, b"x"],
            "thousand": [{**good, "id": "thousand"}, *[b"x"] * 999],
            "too_large": [msgspec.msgpack.encode({**good, "id": "too_large", "text": "x" * limit})],
        }
        for name, frames in odd.items():
            received = len(client.received)
            client.send(*frames)
            client.wait(lambda received=received: _errors(client, received))  # type: ignore[misc]  # bound now
            codes[name] = _errors(client, received)[0]
        wanted = ["bad_message", "unsupported_option", "unsupported_option", "message_too_large"]
        trial.expect("codes", list(codes.values()), wanted)
        with (
            connected_peer(daemon.socket) as announces,
            connected_peer(daemon.socket) as unfinished,
        ):
            declare(announces, 1 << 30)
            try:
                send_unfinished(unfinished, 40, limit // 2)
            except OSError:
                trial.measured["unfinished_message_dropped"] = True
            client.wait(lambda: has_ended(announces))
        trial.expect("a_gigabyte_announced", "dropped", "dropped")
        grown = family_usage(daemon.pid).rss_bytes - before
        trial.at_most("grown_mb", max(0, grown) / 1e6, _GROWTH_MB)
        trial.expect("request_beside", client.outcome(beside), "length")


def mutated_messages(trial: Trial) -> None:
    """Messages of every kind with random bytes changed, through the real socket."""
    daemon, chance = trial.shared(), random.Random(9)
    kinds = [
        {"t": "hello", "proto": [1], "client": "x", "lease_s": 30.0},
        {"t": "tokenize", "id": "t", "text": "the lamp"},
        {"t": "detokenize", "id": "d", "tokens": [65, 66, 67]},
        {"t": "status", "id": "s"},
        {"t": "lease"},
        {"t": "cancel", "id": "c"},
        {"t": "generate", "id": "g", "prompt": "a", "max_tokens": 1, "stop": ["x"], "seed": 1},
        {"t": "generate", "id": "m", "messages": [{"role": "user", "content": "hi"}]},
    ]
    encoded = [msgspec.msgpack.encode(kind) for kind in kinds]
    with trial.client(daemon) as client, closing(WireClient(daemon.socket)) as fuzz:
        before = family_usage(daemon.pid).rss_bytes
        beside = client.generate(PROMPT, max_tokens=100)
        for number in range(_MUTATIONS):
            fuzz.send(_mutated(encoded[number % len(encoded)], chance))
            if not number % 20:
                fuzz.listen(0.001)
                client.listen(0.001)
        fuzz.ask("status")
        codes = {one.answer["code"] for one in fuzz.received if one.answer["t"] == "error"}
        trial.measured |= {"messages": _MUTATIONS, "codes": codes}
        totals = client.ask("status").get("totals", {})
        trial.expect("internal_errors", totals.get("internal_errors", 0), 0)
        grown = family_usage(daemon.pid).rss_bytes - before
        trial.at_most("grown_mb", max(0, grown) / 1e6, _GROWTH_MB)
        trial.expect("request_beside", client.outcome(beside), "length")


def wrong_fields(trial: Trial) -> None:
    """Values out of range or of another type, text that is none, and maps within maps."""
    with trial.client(trial.shared()) as client:
        times, unnamed = [], []
        for field, fields in _WRONG_FIELDS:
            request = {"prompt": PROMPT, "max_tokens": 4, **fields}
            started = time.monotonic()
            answer = client.end(client.generate(**request)).answer
            times.append(seconds_since(started))
            if answer["t"] != "error" or _named(answer) != field:
                unnamed.append([field, answer.get("code"), answer.get("field")])
        trial.expect("refused_without_the_field", unnamed, [])
        trial.measured["refused"] = len(times)
        trial.at_most("slowest_refusal_s", max(times), 1.0)
        deep = b"\x91" * 100_000 + b"\xc0"
        not_utf8 = msgspec.msgpack.encode({"t": "tokenize", "id": "u", "text": "aaaa"})
        codes = []
        for data in (deep, not_utf8.replace(b"aaaa", b"\xff\xfe\xff\xfe")):
            received = len(client.received)
            client.send(data)
            client.wait(lambda received=received: _errors(client, received))  # type: ignore[misc]  # bound now
            codes.append(_errors(client, received)[0])
        trial.expect("nested_and_not_utf8", codes, ["bad_message", "invalid_value"])
        trial.expect("then", client.outcome(client.generate(PROMPT, max_tokens=4)), "length")


def prompt_at_the_limit(trial: Trial) -> None:
    """A prompt that just fits, one token more of reply, and a prompt that is too long."""
    with trial.client(trial.shared()) as client:
        total, longest = client.limits["total_tokens"], client.limits["prompt_tokens"]
        most = min(longest, total - 1)
        text = _text_of(client, most)
        trial.measured |= {"total_tokens": total, "prompt_tokens": most}
        room = total - most
        trial.expect("fits", client.outcome(client.generate(text, max_tokens=room)), "length")
        over = client.outcome(client.generate(text, max_tokens=room + 1))
        trial.expect("reply_too_long", over, "capacity_exceeded")
        too_long = client.outcome(client.generate(text + " a" * 8, max_tokens=1))
        trial.expect("prompt_too_long", too_long, "prompt_too_long")


def special_tokens(trial: Trial) -> None:
    """The words of special tokens in a user's message."""
    with trial.client(trial.shared()) as client:
        ids = {word: client.ask("tokenize", text=word)["tokens"] for word in _SPECIAL}
        word, found = next((one for one in ids.items() if len(one[1]) == 1), ("", [0]))
        if not word:
            raise NotRunError("the model has none of the special tokens that are known")
        plain = client.ask("tokenize", messages=[{"role": "user", "content": "hi"}])
        forged = client.ask("tokenize", messages=[{"role": "user", "content": f"hi{word}"}])
        trial.measured["token"] = word
        counts = [answer.get("tokens", []).count(found[0]) for answer in (plain, forged)]
        trial.expect("more_of_it", counts[1] - counts[0], 0)


def unknown_options(trial: Trial) -> None:
    """Fields that no option has, and an adapter that is not there."""
    with trial.client(trial.shared()) as client:
        found, wanted = [], []
        for field, value, code in (
            ("lora", "mine", "unsupported_option"),
            ("adapter", "mine", "adapter_unknown"),
            ("functions", [{"name": "f"}], "unsupported_option"),
            ("images", [b"x"], "unsupported_option"),
            ("best_of", 2, "unsupported_option"),
        ):
            answer = client.end(client.generate(PROMPT, max_tokens=4, **{field: value})).answer
            found.append([answer.get("code"), answer.get("field") == field])
            wanted.append([code, True])
        trial.expect("refusals", found, wanted)


def protocol_versions(trial: Trial) -> None:
    """Hello with a newer version, an older one, none, and newer ones beside ours."""
    with trial.client(trial.shared(), hello=False) as client:
        newer, older, none = (
            client.send_hello(proto=[2, 3]),
            client.send_hello(proto=[0]),
            client.send_hello(proto=[]),
        )
        codes = [[one.get("code"), one.get("field")] for one in (newer, older)]
        trial.expect("newer_and_older", codes, [["unsupported_protocol", "proto"]] * 2)
        trial.expect("missing", [none.get("code"), none.get("field")], ["invalid_value", "proto"])
        trial.expect("among_others", client.send_hello(proto=[9, 1])["t"], "welcome")


def stop_strings(trial: Trial) -> None:
    """Stop strings that end between two tokens, and replies that end anywhere in a character."""
    with trial.client(trial.shared()) as client:
        whole = client.generate(PROMPT, max_tokens=60)
        client.end(whole)
        text = client.text(whole)
        parts = [str(one.answer["text"]) for one in client.deltas(whole) if one.answer["text"]]
        pairs = [one[-1] + other[0] for one, other in pairwise(parts)][::3]
        stopped = {client.generate(PROMPT, max_tokens=60, stop=[pair]): pair for pair in pairs}
        texts = {pair: client.whole_text(one) for one, pair in stopped.items()}
        # Replies of a real engine may part at near-ties, those of a simulated one are all alike.
        leaks = sum(
            found != text[: text.find(pair)] if trial.simulated else pair in found
            for pair, found in texts.items()
        )
        trial.at_least("stop_strings", len(texts), 1)
        trial.expect("leaks", leaks, 0)
        lengths = range(1, 30)
        cut = [client.generate(PROMPT, max_tokens=length) for length in lengths]
        cut_texts = [client.whole_text(one).rstrip("\ufffd") for one in cut]
        trial.expect(
            "tokens", [len(client.tokens(one)) for one in cut] == list(lengths), wanted=True
        )
        if trial.simulated:
            wrong = sum(not text.startswith(one) for one in cut_texts)
            trial.expect("texts_that_are_not_a_beginning", wrong, 0)


def _text_of(client: WireClient, tokens: int) -> str:
    """A text of so many tokens: a word has one or two, a mark behind words one."""
    text = " a" * (100 * tokens // _tokens(client, " a" * 100))
    while _tokens(client, text) > tokens:
        text = text[:-2]
    while _tokens(client, text) < tokens:
        text += "!"
    return text


def _tokens(client: WireClient, text: str) -> int:
    return len(client.ask("tokenize", text=text)["tokens"])


def _named(answer: dict[str, Any]) -> str:
    """The field that a refusal names, whichever of its entries is at fault."""
    return str(answer.get("field", "")).partition("[")[0]


def _mutated(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    if not chance.randrange(5):
        del changed[chance.randint(1, len(changed)) :]
    return bytes(changed)


def _errors(client: WireClient, behind: int) -> list[str]:
    """The codes of the errors among what came later than the first `behind` answers."""
    later = [one.answer for one in client.received[behind:]]
    return [str(answer["code"]) for answer in later if answer["t"] == "error"]

"""Rows about pictures under load, and about the encoder and the process that decodes for it."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from hearth.bench.vision.session import SIZES, Size, photograph, renamed
from hearth.daemon.cli.errors import Failure
from hearth.daemon.control.client import ask
from hearth.daemon.control.messages import Trace, TraceReport
from hearth.daemon.own_daemon import OwnDaemon
from tests.system.faults.trial import Trial, most, seconds_since
from tests.system.faults.wire_client import PATIENCE_S

PROMPT = "tell me of the lamps in the house"
QUESTION = "What is it?"
_LARGE = Size(2560, 1600)
_CLIENTS = 4
_EACH = 6
_REPLY = 48
_IN_FLIGHT = 6 << 20
_ANSWER_S = 1.0
_TIMEOUT_S = 2.0
_SLACK_S = 1.0
_WAITING = 4
_BUSY = ("queue_full", "too_many_requests")


def images_under_load(trial: Trial) -> None:
    """Four clients send pictures of 1 MB without a pause, more than are held at once."""
    large = photograph(_LARGE)
    trial.at_least("file_mb", len(large) / 1e6, 0.9)
    with trial.seeing("--images-in-flight-bytes", str(_IN_FLIGHT)) as daemon, ExitStack() as stack:
        talks = [stack.enter_context(trial.client(daemon)) for _ in range(_CLIENTS)]
        asked = []
        for number in range(_EACH):
            for place, client in enumerate(talks):
                data = renamed(large, number * _CLIENTS + place)
                asked.append((client, client.look(QUESTION, data, max_tokens=_REPLY)))
        words = [client.outcome(one) for client, one in asked]
        trial.expect("other_words", set(words) - {"length", *_BUSY}, set())
        trial.at_least("served", words.count("length"), _CLIENTS)
        trial.at_least("refused_above_the_limit", sum(map(words.count, _BUSY)), 1)
        ended = ask(Trace(last=len(words)), TraceReport, str(daemon.socket)).requests
        spans = [
            (one.opened + one.tokenize_s, one.opened + one.tokenize_s + one.images_s)
            for one in ended
            if one.images is not None and one.images_s
        ]
        told = [received.seconds for client, one in asked for received in client.deltas(one)]
        beside = sum(any(began < at < end for began, end in spans) for at in told)
        trial.measured["deltas"] = len(told)
        trial.at_least("deltas_while_pictures_are_encoded", beside, 1)
        small = talks[0].look(QUESTION, photograph(SIZES[0]), max_tokens=4)
        trial.expect("then", talks[0].outcome(small), "length")


def encoder_killed(trial: Trial) -> None:
    """The encoder is killed with pictures under way, beside a text reply."""
    small = photograph(SIZES[0])
    with trial.seeing() as daemon, trial.client(daemon) as client:
        kept = client.look(QUESTION, small, max_tokens=8)
        client.end(kept)
        with _stopped(_encoder(daemon)) as encoder:
            lost = [client.look(QUESTION, renamed(small, n), max_tokens=8) for n in range(_WAITING)]
            client.wait_for_status(lambda status: status["queued"] == _WAITING)
            beside = client.generate(PROMPT, max_tokens=most(client) // 2)
            client.wait_for_deltas(beside)
            os.kill(encoder, signal.SIGKILL)
            killed = time.monotonic()
            last = max(client.end(one).seconds for one in lost)
        trial.at_most("answer_s", last - killed, _ANSWER_S)
        trial.expect("codes", {client.outcome(one) for one in lost}, {"encoder_failed"})
        trial.expect("state", client.ask("status")["state"], "ready")
        trial.expect("beside", client.outcome(beside), "length")
        again = client.look(QUESTION, small, max_tokens=8)
        trial.expect("kept_picture", client.whole_text(again), client.text(kept))
        new = client.look(QUESTION, renamed(small, _WAITING), max_tokens=8)
        trial.expect("new_picture", client.outcome(new), "length")
        trial.measured["replaced_s"] = seconds_since(killed)
        trial.expect("replaced", _encoder(daemon) != encoder, wanted=True)


def decoder_killed(trial: Trial) -> None:
    """The process that decodes is killed with pictures in its hands, beside a text reply."""
    small = photograph(SIZES[0])
    with trial.seeing() as daemon, trial.client(daemon) as client:
        client.end(client.look(QUESTION, small, max_tokens=4))
        with _stopped(_decoder(daemon)) as decoder:
            waiting = [
                client.look(QUESTION, renamed(small, n), max_tokens=4) for n in range(_WAITING)
            ]
            client.wait_for_status(lambda status: status["queued"] == _WAITING)
            beside = client.generate(PROMPT, max_tokens=most(client) // 2)
            client.wait_for_deltas(beside)
            os.kill(decoder, signal.SIGKILL)
            killed = time.monotonic()
            words = [client.outcome(one) for one in waiting]
        trial.measured["answered_s"] = seconds_since(killed)
        trial.expect("other_words", set(words) - {"length", "image_invalid"}, set())
        trial.at_most("failed", words.count("image_invalid"), 1)
        trial.expect("beside", client.outcome(beside), "length")
        again = client.look(QUESTION, renamed(small, 0), max_tokens=4)
        trial.expect("then", client.outcome(again), "length")


def decoder_hangs(trial: Trial) -> None:
    """The process that decodes stands still for good, beside a text reply."""
    small = photograph(SIZES[0])
    limit = ("--image-decode-timeout-s", str(_TIMEOUT_S))
    with trial.seeing(*limit) as daemon, trial.client(daemon) as client:
        client.end(client.look(QUESTION, small, max_tokens=4))
        with _stopped(_decoder(daemon)):
            stopped = time.monotonic()
            first = client.look(QUESTION, renamed(small, 0), max_tokens=4)
            client.wait_for_status(lambda status: status["queued"] == 1)
            behind = [
                client.look(QUESTION, renamed(small, 1 + n), max_tokens=4) for n in range(_WAITING)
            ]
            beside = client.generate(PROMPT, max_tokens=60)
            trial.expect("beside", client.outcome(beside), "length")
            trial.at_most("answer_s", client.end(first).seconds - stopped, _TIMEOUT_S + _SLACK_S)
            trial.expect("code", client.outcome(first), "image_timeout")
            trial.expect("behind", {client.outcome(one) for one in behind}, {"length"})
            trial.measured["replaced_s"] = seconds_since(stopped)


@contextmanager
def _stopped(process: int) -> Iterator[int]:
    """Let a process stand still; at the end it goes on, if it is still there."""
    os.kill(process, signal.SIGSTOP)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


def _encoder(daemon: OwnDaemon) -> int:
    return _waited(lambda: daemon.encoder, "encoder")


def _decoder(daemon: OwnDaemon) -> int:
    encoder = _encoder(daemon)
    return _waited(lambda: _child(encoder), "process that decodes")


def _child(encoder: int) -> int | None:
    for children in Path(f"/proc/{encoder}/task").glob("*/children"):
        with suppress(OSError):
            for child in children.read_text().split():
                return int(child)
    return None


def _waited(find: Callable[[], int | None], what: str) -> int:
    deadline = time.monotonic() + PATIENCE_S
    while (found := find()) is None:
        if time.monotonic() > deadline:
            raise Failure(f"the daemon has no {what}")
        time.sleep(0.02)
    return found

"""Rows about files of weights, and of the prefix cache, that change under a daemon."""

import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hearth.bench.random_model import QUICK_SHAPE, write_random_model
from hearth.daemon.own_daemon import OwnDaemon, own_daemon
from hearth.runtime.kv_cache.disk_cache import HEAD_BYTES, VERSION, decode_head, encode_head
from tests.system.faults.trial import NotRunError, Trial, most, seconds_since
from tests.system.faults.wire_client import WireClient

_CAPACITY = 4096
"""A reply of so many tokens runs for longer than a look takes to come."""


_PROMPTS = ("the lamp is on", "open the door", "what is the time")
_TOKENS = 24
_NOTICED_S = 1.5
"""A look a second, and what the daemon's loop may be late."""


_SETTLED_S = 5.0
_GONE_S = 20.0
_CONFIGURATION = 78
_FLAGS = ("--speculation", "off", "--threads", "1", "--log-level", "warning")


class Files(NamedTuple):
    """An engine, weights of another model for it, and the path that is served."""

    engine: Path
    first: bytes
    other: bytes
    served: Path

    @contextmanager
    def daemon(self, data: bytes, *flags: str) -> Iterator[OwnDaemon]:
        """A daemon with a real engine that serves a file of these bytes."""
        self.served.write_bytes(data)
        given = ("--weights", str(self.served), *_FLAGS, *flags)
        with own_daemon(self.engine, given) as daemon:
            yield daemon


def weights_changed(trial: Trial) -> None:
    """Another model's file is written over the one that is served, beside a reply that runs."""
    with _two_models() as files:
        with files.daemon(files.other) as daemon, trial.client(daemon) as client:
            right = _replies(client)
        with files.daemon(files.first) as daemon, trial.client(daemon) as client:
            before = _replies(client)
            trial.expect("models_differ", before != right, wanted=True)
            running = client.generate("runs", max_tokens=most(client))
            client.wait_for_deltas(running, 2)
            # The same inode, as cp does.
            files.served.write_bytes(files.other)
            written = time.monotonic()
            client.wait_for_status(lambda status: status["state"] != "ready")
            trial.at_most("noticed_s", seconds_since(written), _NOTICED_S)
            trial.expect("file_is_named", str(files.served) in client.ask("status")["reason"], True)
            trial.expect("running", client.outcome(running), "executor_failed")
            # They wait for the next executor.
            trial.expect("replies_are_those_of_the_other", _replies(client) == right, wanted=True)
            trial.measured["replaced_s"] = seconds_since(written)
            trial.expect("state", client.ask("status")["state"], "ready")


def weights_cut(trial: Trial) -> None:
    """The file that is served is cut to its half, stays so, and is whole again."""
    with _two_models() as files:
        daemon_of = files.daemon(files.first, "--restart-limit", "1")
        with daemon_of as daemon, trial.client(daemon) as client:
            before = _replies(client)
            running = client.generate("runs", max_tokens=most(client))
            client.wait_for_deltas(running, 2)
            os.truncate(files.served, len(files.first) // 2)
            cut = time.monotonic()
            client.wait_for_status(lambda status: status["state"] != "ready")
            trial.at_most("noticed_s", seconds_since(cut), _NOTICED_S)
            trial.expect("running", client.outcome(running), "executor_failed")
            client.listen(_SETTLED_S)
            status = client.ask("status")
            trial.expect("serves_meanwhile", status["state"] == "ready", wanted=False)
            trial.expect("named", str(files.served) in status["reason"], wanted=True)
            refused = client.generate("refused", max_tokens=4)
            trial.expect("code", client.outcome(refused), "weights_invalid")
            trial.at_most("starts_meanwhile", daemon.log().count("actor failed"), 1)
            files.served.write_bytes(files.first)
            whole = time.monotonic()
            client.wait_for_status(lambda status: status["state"] == "ready")
            trial.measured["served_again_s"] = seconds_since(whole)
            trial.expect("replies_as_before", _replies(client) == before, wanted=True)
        os.truncate(files.served, len(files.first) // 2)
        flags = ("--weights", str(files.served), *_FLAGS)
        with tempfile.TemporaryDirectory(prefix="hearth-") as folder:
            alone = OwnDaemon(Path(folder), files.engine, flags)
            try:
                trial.expect("exit_code_at_a_start", alone.wait(_GONE_S), _CONFIGURATION)
            finally:
                alone.kill()


def _replies(client: WireClient) -> list[list[int]]:
    """The tokens of replies to a few prompts, one after the other."""
    replies = []
    for prompt in _PROMPTS:
        asked = client.generate(prompt, max_tokens=_TOKENS)
        client.end(asked)
        replies.append([token.token_id for token in client.tokens(asked)])
    return replies


@contextmanager
def _two_models() -> Iterator[Files]:
    """Two random models in files for one engine; raises NotRunError where none can be served."""
    from hearth.runtime.errors import HearthError  # noqa: PLC0415 - export loads much
    from hearth.runtime.export import ExportOptions, export_model  # noqa: PLC0415 - likewise
    from hearth.runtime.export.export import export_weights  # noqa: PLC0415 - likewise

    with tempfile.TemporaryDirectory(prefix="hearth-weights-") as name:
        folder = Path(name)
        engine, other = folder / "engine", folder / "other.safetensors"
        for seed in range(2):
            write_random_model(folder / f"model-{seed}", QUICK_SHAPE, seed=seed)
        options = ExportOptions(capacity=_CAPACITY, max_batch=4, external_weights=True)
        try:
            export_model(folder / "model-0", engine, options)
            export_weights(folder / "model-1", engine, other)
        except HearthError as error:
            raise NotRunError(error.message) from error
        first = (engine / "weights.safetensors").read_bytes()
        yield Files(engine, first, other.read_bytes(), folder / "served.safetensors")


_PROMPT = "the lamps in the house are on and the doors are open " * 12
_REPLY = 12
_DISK = ("--prefix-disk-bytes", str(1 << 28))
_VERSION_AT = 8


def pages_on_disk(trial: Trial) -> None:
    """A daemon is started again and again with what the one before has left on disk."""
    with tempfile.TemporaryDirectory(prefix="hearth-") as name:
        folder = Path(name)
        trial.expect("cached_at_first", _cached(trial, folder), 0)
        modes = {oct(stat.S_IMODE(path.stat().st_mode)) for path in _pages(folder)}
        trial.expect("modes", modes, {"0o600"})
        trial.at_least("cached_after_a_restart", _cached(trial, folder), 1)
        for what, (change, words) in _CHANGES.items():
            (first,) = (path for path in _pages(folder) if _begins(path))
            first.write_bytes(change(first.read_bytes()))
            trial.expect(f"cached_{what}", _cached(trial, folder), 0)
            told = f"{first.name} {words}" in (folder / "log").read_text()
            trial.expect(f"told_{what}", told, wanted=True)


def _cached(trial: Trial, folder: Path) -> int:
    """Count the tokens that a daemon takes from the disk; its reply has to be that without them."""
    flags = (*_DISK, "--prefix-folder", str(folder / "pages"))
    with trial.daemon(*flags, log=folder / "log") as daemon:
        with trial.client(daemon) as client:
            options = {"max_tokens": _REPLY, "logprobs": 2}
            found = client.generate(_PROMPT, **options)
            usage = client.end(found).answer.get("usage", {})
            plain = client.generate(_PROMPT, cache="bypass", **options)
            client.end(plain)
            trial.same_tokens(client, found, plain)
        daemon.stop()
    return int(usage.get("cached_tokens", 0))


def _pages(folder: Path) -> list[Path]:
    return list(folder.rglob("*.page"))


def _begins(path: Path) -> bool:
    head = decode_head(path.read_bytes()[:HEAD_BYTES], path.name)
    return head.parent == head.root


def _spoiled(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def _of_another_model(data: bytes) -> bytes:
    head = decode_head(data[:HEAD_BYTES], "page")
    return encode_head(head._replace(engine=os.urandom(len(head.engine)))) + data[HEAD_BYTES:]


def _of_another_version(data: bytes) -> bytes:
    version = (VERSION + 1).to_bytes(4, "little")
    return data[:_VERSION_AT] + version + data[_VERSION_AT + len(version) :]


def _cut_short(data: bytes) -> bytes:
    return data[:-1]


_CHANGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "damaged": (_spoiled, "is damaged"),
    "of_another_model": (_of_another_model, "belongs to another engine"),
    "of_another_version": (_of_another_version, f"is of version {VERSION + 1}"),
    "cut_short": (_cut_short, "has "),
}

"""Files of the prefix cache that are not what they say."""

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from hearth.runtime.kv_cache.disk_cache import HEAD_BYTES, VERSION, decode_head, encode_head
from tests.system.faults.trial import Trial

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

"""Keys of programs that come by HTTP: a file of names and digests, no key itself."""

import hashlib
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "hearth-"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_LINE = re.compile(rf"({_NAME.pattern}) ([0-9a-f]{{64}})")
_HEAD = "# Keys of hearth-http: a name and the SHA-256 of its key in each line.\n"


class KeysInvalid(Exception):  # noqa: N818 - a fault of the file, not of the program
    """A file of keys that cannot be read or written, or a name that cannot stand in it."""


@dataclass(frozen=True)
class Key:
    """A key by its name and digest."""

    name: str
    digest: str

    @property
    def cache_salt(self) -> str:
        """Salt of the prefix cache: what one key has asked for tells nothing to another."""
        return hashlib.sha256(f"cache salt {self.digest}".encode()).hexdigest()


def read_keys(path: Path) -> dict[str, Key]:
    """The keys of a file by their digests; raises KeysInvalid."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise KeysInvalid(f"the keys in {path} cannot be read: {reason}") from None
    found: dict[str, Key] = {}
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise KeysInvalid(f"line {number} of {path} is not a name and a SHA-256")
        found[match[2]] = Key(match[1], match[2])
    return found


def key_of(keys: dict[str, Key], secret: str) -> Key | None:
    """The key that a program shows; None where it is not listed.

    A key is drawn at random and looked up by its digest, so the time of it tells nothing.
    """
    return keys.get(hashlib.sha256(secret.encode()).hexdigest())


def add_key(path: Path, name: str) -> str:
    """Draw a key and list it, in place of one of the same name; returns it, to be shown once."""
    if not _NAME.fullmatch(name):
        raise KeysInvalid(f"{name} is no name of a key: 1 to 64 letters, digits and signs of _.-")
    secret = _PREFIX + secrets.token_urlsafe(32)
    digest = hashlib.sha256(secret.encode()).hexdigest()
    keys = read_keys(path) if path.exists() else {}
    others = [key for key in keys.values() if key.name != name]
    _write(path, [*others, Key(name, digest)])
    return secret


def remove_key(path: Path, name: str) -> None:
    """Take a key off the list; raises KeysInvalid where there is none of that name."""
    keys = read_keys(path).values()
    left = [key for key in keys if key.name != name]
    if len(left) == len(keys):
        raise KeysInvalid(f"there is no key {name} in {path}")
    _write(path, left)


def _write(path: Path, keys: list[Key]) -> None:
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.unlink(missing_ok=True)
        with fresh.open("x", encoding="utf-8") as file:
            file.write(_HEAD + "".join(f"{key.name} {key.digest}\n" for key in keys))
            os.fchmod(file.fileno(), path.stat().st_mode & 0o777 if path.exists() else 0o600)
        fresh.replace(path)
    except OSError as error:
        raise KeysInvalid(f"{path} cannot be written: {error.strerror}") from None

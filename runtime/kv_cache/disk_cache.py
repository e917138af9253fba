"""Pages of the prefix cache in files that survive a restart."""

import hashlib
import os
import re
import stat
import struct
import tempfile
import threading
import time
from collections import OrderedDict, deque
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from hearth.runtime.errors import HearthError
from hearth.runtime.kv_cache.page_index import root_of
from hearth.runtime.kv_cache.pages import (
    NAME_BYTES,
    PAGE_TOKENS,
    TOKEN_BYTES,
    Page,
    Stored,
    page_name,
    root_name,
)

VERSION = 2
"""1 knew videos by their bytes alone, whichever of their frames these were of."""
SUFFIX = ".page"
_MAGIC = b"HEARTHKV"
_MOST_TOKENS_BYTES = PAGE_TOKENS * TOKEN_BYTES
# Magic, version, draft, tokens, bytes of the page; engine, root, parent; digest of the page.
_FIELDS = struct.Struct(f"<8sIIIQ{NAME_BYTES}s{NAME_BYTES}s{NAME_BYTES}s32s")
_DIGESTED = _FIELDS.size + _MOST_TOKENS_BYTES
HEAD_BYTES = _DIGESTED + 32


class PageFileHeader(NamedTuple):
    """Header of the file of a page.

    `engine` and `root` name the engine and adapter that computed it, `parent` the page before;
    `digest` is the SHA-256 of the page's `size` bytes.
    """

    engine: bytes
    root: bytes
    parent: bytes
    tokens: bytes
    draft: bool
    size: int
    digest: bytes

    @property
    def name(self) -> bytes:
        """The name of the page."""
        return page_name(self.parent, self.tokens)


def encode_head(head: PageFileHeader) -> bytes:
    """Encode the first `HEAD_BYTES` of a file; the last of them are a digest of the others."""
    fields = _FIELDS.pack(
        _MAGIC,
        VERSION,
        head.draft,
        len(head.tokens) // TOKEN_BYTES,
        head.size,
        head.engine,
        head.root,
        head.parent,
        head.digest,
    )
    said = fields + head.tokens.ljust(_MOST_TOKENS_BYTES, b"\0")
    return said + hashlib.sha256(said).digest()


def decode_head(data: bytes, name: str) -> PageFileHeader:
    """Decode a header; raises `spill_invalid`, naming the file, unless it is whole and current."""
    magic, version = struct.unpack_from("<8sI", data.ljust(12, b"\0"))
    if magic != _MAGIC:
        raise spill_invalid(name, "is no page of the prefix cache")
    if version != VERSION:
        raise spill_invalid(name, f"is of version {version} and {VERSION} is read here")
    said = data[:_DIGESTED]
    if hashlib.sha256(said).digest() != data[_DIGESTED:HEAD_BYTES]:
        raise spill_invalid(name, "is damaged")
    _, _, draft, count, size, engine, root, parent, digest = _FIELDS.unpack_from(said)
    if not 0 < count <= PAGE_TOKENS:
        raise spill_invalid(name, f"says that it holds {count} tokens")
    tokens = said[_FIELDS.size : _FIELDS.size + count * TOKEN_BYTES]
    return PageFileHeader(engine, root, parent, tokens, bool(draft), size, digest)


def spill_invalid(name: str, what: str) -> HearthError:
    """The error about a file of that name, which is removed."""
    return HearthError(
        "spill_invalid", f"{name} {what}: it is removed, and what it held is computed", name
    )


_ENGINES = re.compile(r"[0-9a-f]{32}\.v[0-9]+")


class _File(NamedTuple):
    used: float
    size: int
    path: Path


class StaleCacheFiles:
    """Pages of other engines, and of other versions, in the same folder: the oldest goes first."""

    def __init__(self, folder: Path, own: Path) -> None:
        found = []
        for path in folder.glob(f"*/*{SUFFIX}"):
            if path.parent != own and _ENGINES.fullmatch(path.parent.name):
                with suppress(OSError):
                    facts = path.lstat()
                    found.append(_File(facts.st_mtime, facts.st_size, path))
        self._files = deque(sorted(found))
        self.bytes = sum(file.size for file in found)

    def shrink_to(self, most_bytes: int) -> None:
        """Remove files until the rest takes no more than that, or nothing is left."""
        while self._files and self.bytes > most_bytes:
            file = self._files.popleft()
            self.bytes -= file.size
            # Whoever put it there may have removed it, and a folder goes with its last file.
            with suppress(OSError):
                file.path.unlink(missing_ok=True)
                file.path.parent.rmdir()


_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_private(folder: Path) -> None:
    """Make a folder that no other user can write to.

    Raises `invalid_value` with the field `prefix_folder`.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
        usable = os.access(folder, os.R_OK | os.W_OK | os.X_OK)
    except OSError as error:
        raise _unusable(folder, f"cannot be used ({error.strerror})") from error
    if facts.st_uid != os.geteuid() or facts.st_mode & _OF_OTHERS:
        raise _unusable(folder, "has to be this user's own, and nobody else's to write to")
    if not usable:
        raise _unusable(folder, "cannot be read and written")


def open_private(path: Path) -> FileIO:
    """Open a regular file that no other user can have written; raises OSError."""
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    facts = os.fstat(number)
    if (
        not stat.S_ISREG(facts.st_mode)
        or facts.st_uid != os.geteuid()
        or facts.st_mode & _OF_OTHERS
    ):
        os.close(number)
        raise PermissionError(0, "others may have written it")
    return FileIO(number)


def _unusable(folder: Path, what: str) -> HearthError:
    return HearthError("invalid_value", f"the folder {folder} {what}", "prefix_folder")


MOST_WAITING = 16
"""Number of pages that may wait to be written; a further `write` waits or is refused."""
_MOST_FAILURES = 16
_PARTIAL = ".partial"
_SETTLED_S = 60.0
"""Age in seconds at which a partial file counts as left by a process that is gone."""


class _Waiting(NamedTuple):
    page: Page
    head: PageFileHeader
    data: bytes


class DiskCache:
    """Write pages in a thread, read them while the caller waits, and check what is read.

    Each engine has a folder of its own in `folder`; pages of other engines are removed first. Only
    this user may read folders and files. A page has `page_bytes`, and `most_bytes` hold `pages`
    pages; the index counts them. Several processes may share a folder: a page that another process
    has removed counts as missing.

    Raises `invalid_value` with the field `prefix_folder` for a folder that cannot be used, or that
    other users may write to.
    """

    def __init__(self, folder: Path, engine: bytes, page_bytes: int, most_bytes: int) -> None:
        self._engine = root_name(engine, b"")
        self._folder = folder / f"{self._engine.hex()}.v{VERSION}"
        self._page_bytes = page_bytes
        self._most_bytes = most_bytes
        self.file_bytes = HEAD_BYTES + page_bytes
        self.pages = most_bytes // self.file_bytes
        make_private(folder)
        make_private(self._folder)
        self._others = StaleCacheFiles(folder, self._folder)
        self._written: set[bytes] = set()
        self._turn = threading.Condition()
        self._waiting: OrderedDict[bytes, _Waiting] = OrderedDict()
        self._lost: list[Page] = []
        self._failures: deque[HearthError] = deque(maxlen=_MOST_FAILURES)
        self._failing = False
        self._closing = False
        self._thread = threading.Thread(target=self._write_all, name="disk_cache", daemon=True)

    def found(self) -> list[Stored]:
        """Return the pages stored before, from their heads alone; remove other files.

        Call it once, before the first write. Files that cannot be used become failures.
        """
        stored = []
        for path in self._folder.iterdir():
            try:
                used = path.lstat().st_mtime
                if path.suffix == _PARTIAL:
                    if time.time() - used > _SETTLED_S:
                        _remove(path)
                    continue
                with open_private(path) as file:
                    head = self._checked(path, file.read(HEAD_BYTES), os.fstat(file.fileno()))
            except HearthError as error:
                self._abort(path, error)
            except OSError as error:
                self._abort(path, spill_invalid(path.name, f"cannot be read ({error.strerror})"))
            else:
                stored.append(Stored(head.root, head.parent, head.tokens, head.draft, used))
                self._written.add(head.name)
        self._others.shrink_to(self._most_bytes - len(stored) * self.file_bytes)
        return stored

    def write(
        self, page: Page, data: bytes, within_s: float = 0.0, *, draft: bool | None = None
    ) -> bool:
        """Queue a page for writing, whose bytes must not change; False if too many pages wait.

        `within_s` is the most seconds to wait for other pages to be written. `draft` is True if the
        bytes have a draft's state; by default it is `page.draft`.
        """
        draft = page.draft if draft is None else draft
        root = root_of(page).name
        parent = root if page.parent is None else page.parent.name
        head = PageFileHeader(self._engine, root, parent, page.tokens, draft, len(data), b"")
        with self._turn:
            room = self._turn.wait_for(lambda: len(self._waiting) < MOST_WAITING, within_s)
            if not room or self._closing:
                return False
            self._waiting[page.name] = _Waiting(page, head, data)
            if not self._thread.is_alive():
                self._thread.start()
            self._turn.notify_all()
        return True

    def read(self, page: Page) -> bytes:
        """Return the bytes of a page that was written, or found; its file counts as used now.

        Raises `spill_invalid` naming a file that is missing, damaged, of another version or of
        another page or engine: it is removed, and the page has to be dropped.
        """
        with self._turn:
            waiting = self._waiting.get(page.name)
        if waiting is not None:
            return waiting.data
        path = self._path(page.name)
        try:
            with open_private(path) as file:
                head = self._checked(path, file.read(HEAD_BYTES), os.fstat(file.fileno()))
                data = file.read(self._page_bytes)
                os.utime(file.fileno())
            if hashlib.sha256(data).digest() != head.digest or page.draft > head.draft:
                raise spill_invalid(path.name, "is damaged")
        except OSError as error:
            self.erase(page.name)
            raise spill_invalid(path.name, f"cannot be read ({error.strerror})") from error
        except HearthError:
            self.erase(page.name)
            raise
        return data

    def erase(self, name: bytes) -> None:
        """Remove a page, written already or not."""
        with self._turn:
            self._waiting.pop(name, None)
            self._written.discard(name)
            _remove(self._path(name))
            self._turn.notify_all()

    def take_lost(self) -> list[Page]:
        """Take the pages that could not be written since the last call."""
        with self._turn:
            lost, self._lost = self._lost, []
        return lost

    def take_failures(self) -> list[HearthError]:
        """Take the newest errors about files since the last call."""
        with self._turn:
            failures = list(self._failures)
            self._failures.clear()
        return failures

    def close(self, within_s: float) -> None:
        """Write the waiting pages, within `within_s` seconds at the most."""
        with self._turn:
            self._turn.wait_for(lambda: not self._waiting, within_s)
            self._closing = True
            self._waiting.clear()
            self._turn.notify_all()
        if self._thread.is_alive():
            self._thread.join(within_s)

    def _path(self, name: bytes) -> Path:
        return self._folder / f"{name.hex()}{SUFFIX}"

    def _checked(self, path: Path, data: bytes, facts: os.stat_result) -> PageFileHeader:
        """The head of a file that holds a whole page of this engine."""
        head = decode_head(data, path.name)
        if head.engine != self._engine:
            raise spill_invalid(path.name, "belongs to another engine")
        if path != self._path(head.name):
            raise spill_invalid(path.name, "has the name of another page")
        if not head.size == self._page_bytes == facts.st_size - HEAD_BYTES:
            raise spill_invalid(path.name, f"has {facts.st_size} bytes and not {self.file_bytes}")
        return head

    def _abort(self, path: Path, error: HearthError) -> None:
        _remove(path)
        self._failures.append(error)

    def _write_all(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._waiting or self._closing)
                if self._closing:
                    return
                name, waiting = next(iter(self._waiting.items()))
                new = name not in self._written
                own = (len(self._written) + new) * self.file_bytes
            try:
                self._others.shrink_to(self._most_bytes - own)
                self._finish(name, waiting, self._write_partial(waiting))
            except OSError as error:
                self._fail(name, waiting, error)

    def _write_partial(self, waiting: _Waiting) -> Path:
        head = waiting.head._replace(digest=hashlib.sha256(waiting.data).digest())
        number, partial = self._new_partial()
        try:
            with os.fdopen(number, "wb", buffering=0) as file:
                for piece in (encode_head(head), waiting.data):
                    left = memoryview(piece)
                    while left:
                        left = left[file.write(left) :]
        except OSError:
            _remove(Path(partial))
            raise
        return Path(partial)

    def _new_partial(self) -> tuple[int, str]:
        with suppress(FileNotFoundError):
            return tempfile.mkstemp(_PARTIAL, dir=self._folder)
        # Who removes all that is kept, while it is served, does not forbid to keep what comes.
        with suppress(HearthError):
            make_private(self._folder.parent)
            make_private(self._folder)
        return tempfile.mkstemp(_PARTIAL, dir=self._folder)

    def _finish(self, name: bytes, waiting: _Waiting, partial: Path) -> None:
        try:
            with self._turn:
                # It may have been erased meanwhile, or brought again.
                if self._waiting.get(name) is waiting:
                    partial.replace(self._path(name))
                    del self._waiting[name]
                    self._written.add(name)
                    self._failing = False
                self._turn.notify_all()
        finally:
            _remove(partial)

    def _fail(self, name: bytes, waiting: _Waiting, error: OSError) -> None:
        with self._turn:
            if self._waiting.get(name) is waiting:
                del self._waiting[name]
                self._lost.append(waiting.page)
            if not self._failing:
                # Once until something can be written again, else a full disk would say it forever.
                self._failing = True
                self._failures.append(
                    HearthError(
                        "spill_failed",
                        f"pages of the prefix cache cannot be written to {self._folder}"
                        f" ({error.strerror})",
                        "prefix_folder",
                    )
                )
            self._turn.notify_all()


def _remove(path: Path) -> None:
    # A folder stays where a file should be, and does no harm.
    with suppress(OSError):
        path.unlink(missing_ok=True)

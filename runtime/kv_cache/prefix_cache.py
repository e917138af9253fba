import hashlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import get_args

import msgspec

from hearth.runtime.batch import DecodingRow, RowState
from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.errors import HearthError
from hearth.runtime.kv_cache.page_index import PageIndex
from hearth.runtime.kv_cache.page_loads import DiskTier, PageLoads
from hearth.runtime.kv_cache.page_pool import PagePool
from hearth.runtime.kv_cache.pages import (
    PAGE_TOKENS,
    Change,
    Erase,
    Match,
    Move,
    Page,
    Save,
    Tier,
    TokenIdentities,
    Write,
    root_name,
)
from hearth.runtime.request import RowRequest


class PrefixMetrics(msgspec.Struct):
    """Counters of a prefix cache since the start, and the bytes that it holds now.

    `rows` rows were looked up, `hits` of them found a prefix; of their `queried` tokens `reused`
    were not computed again. `skipped` tokens were cached, but computing them was faster. `evicted`
    pages have left their last tier, and `damaged` pages were dropped, as their files were not
    whole. `bytes` are by tier (`device`, `host`, `disk`); clients keep `pinned` bytes.
    """

    rows: int = 0
    hits: int = 0
    queried: int = 0
    reused: int = 0
    skipped: int = 0
    evicted: int = 0
    damaged: int = 0
    pinned: int = 0
    bytes: dict[str, int] = {}


INT4_EXACT = "avx512_vnni"
"""CPU feature with which ONNX Runtime's int4 products give a row the same bits in any batch."""


def engine_digest(engines: Sequence[LLMEngineRunnerConfig]) -> bytes:
    """Digest that differs for engines whose keys and values differ: by files and backend."""
    found = hashlib.blake2b(digest_size=16)
    for one in engines:
        runs = (one.backend, one.device, one.dialect, one.operators, one.kv_cache_dtype)
        files = sorted((name, record.sha256) for name, record in one.files.items())
        found.update(repr((runs, files)).encode())
    return found.digest()


def is_exact(config: LLMEngineRunnerConfig, instructions: Collection[str]) -> bool:
    """Return True if a token has the same numbers, bit for bit, in any step that computes it.

    Then replies are the same with and without a prefix cache. The backend `kernels` is made for
    that. On the CPU three kinds of products round a single row differently: of int8 weights,
    also if only the head has them; of an adapter; and of int4 weights without the `instructions`
    with which they were measured.
    """
    if config.backend == "kernels":
        return True
    kind = (config.device, config.dialect, config.dtype)
    stored = {config.weight_quantization, config.head_weights}
    whole = "int8" not in stored and ("int4" not in stored or INT4_EXACT in instructions)
    return kind == ("cpu", "native", "float32") and whole


class PrefixCache:
    """Cache of the keys and values of earlier prompts and replies, by their prefixes.

    A row is looked up before it has a place, its cache slots are filled once it has one, and its
    tokens are saved after its chunks and when it leaves. `engine` is the digest of the engines (see
    `engine_digest`), `digest_of` gives the digest of an adapter by its name. `drafted` counts the
    entries of a row in the draft's cache, from its first token on and without a gap. An `exact`
    engine gives a token the same bits in any step except trees with branches; then tokens of such
    trees are not kept.
    """

    def __init__(
        self,
        index: PageIndex,
        pool: PagePool,
        engine: bytes,
        *,
        exact: bool,
        digest_of: Callable[[str], str],
        drafted: Callable[[DecodingRow], int] | None = None,
        loads: PageLoads,
        disk: DiskTier | None = None,
    ) -> None:
        self._index, self._pool = index, pool
        self._engine, self._digest_of = engine, digest_of
        self._exact = exact
        self._drafted = drafted
        self._loads, self._disk = loads, disk
        self._failures: list[HearthError] = []
        self._metrics = PrefixMetrics()
        self._tokens: dict[DecodingRow, TokenIdentities] = {}
        # Of rows that have left their places while their last token is being sampled.
        self._ending: dict[DecodingRow, TokenIdentities] = {}
        self._found: dict[DecodingRow, Match] = {}
        # In the order of the chunks that fill them. Until a chunk's logits have been read its pages
        # may hold numbers that are not finite, those of tokens before the one at fault too.
        self._unread = deque[tuple[object, dict[DecodingRow, list[Page]]]]()
        if disk is not None:
            self._apply(index.adopt(disk.disk_cache.found()), 0)

    @property
    def metrics(self) -> PrefixMetrics:
        """Counters since the start, and the bytes held now."""
        found, size = self._metrics, self._pool.page_bytes
        found.bytes = {tier: self._index.held_in(tier) * size for tier in get_args(Tier)}
        found.skipped = self._loads.skipped
        found.evicted, found.pinned = self._index.evicted, self._index.pinned * size
        return found

    def look_up(self, rows: Iterable[DecodingRow]) -> int:
        """Set `filled` of new rows to their cached tokens; returns the sum.

        `fill` loads these tokens when the rows have their places. The last token of a prompt is
        always computed, for its logits. With the draft's state the token before it is computed too,
        as the draft's next entry needs its hidden state.
        """
        before = self._metrics.reused
        for row in rows:
            if row.options.cache == "bypass" or not row.runs_on:
                continue
            tokens = self._identities(row.request)
            self._tokens[row] = tokens
            count = len(row.initial)
            match = self._match(tokens, count if self._pool.has_draft else count - 1)
            match = self._loads.take(match)
            self._invalidate_damaged()
            if self._pool.has_draft and match.draft == match.tokens:
                row.filled = row.drafted = max(0, match.tokens - 1)
            else:
                row.filled = min(match.tokens, count - 1)
                row.drafted = max(0, match.draft - 1)
            row.reused = row.filled
            self._metrics.rows += 1
            self._metrics.queried += count
            self._metrics.reused += row.filled
            if row.filled:
                self._metrics.hits += 1
                self._index.hold(match.pages)
                self._found[row] = match
        return self._metrics.reused - before

    def fill(self, rows: Sequence[DecodingRow]) -> None:
        """Load the found pages of rows that have got their places."""
        for place, row in enumerate(rows):
            match = self._found.pop(row, None)
            if match is not None:
                self._loads.load(match, place, row.filled, row.drafted)
                self._index.release(match.pages)
        self._loads.done()

    def chunk(self, step: object, rows: Sequence[DecodingRow], first: int) -> None:
        """Save the pages that a chunk has filled, of the rows from place `first` on.

        No other row gets these pages before the step has been `collected`.
        """
        pages = dict[DecodingRow, list[Page]]()
        self._unread.append((step, pages))
        for place, row in enumerate(rows, first):
            count = row.filled if not row.prompt_left else row.filled // PAGE_TOKENS * PAGE_TOKENS
            tokens = self._tokens.get(row)
            if tokens is not None and count:
                pages[row] = self._save(tokens, row, place, count)

    def _read(self, step: object, healthy: Container[DecodingRow]) -> None:
        """Give other rows the pages of `healthy` rows of a chunk whose logits have been read.

        The chunk's other pages are dropped, and all pages of earlier chunks that were not read.
        """
        while self._unread:
            chunk, pages = self._unread.popleft()
            for row, saved in pages.items():
                if chunk is not step or row not in healthy:
                    self._drop(saved)
            if chunk is step:
                return

    def collected(
        self, step: object, rows: Iterable[DecodingRow], live: Iterable[DecodingRow], *, chunk: bool
    ) -> None:
        """Note that the logits of a step of these rows were read; `chunk` tells a prompt chunk.

        The logits of a row that is not `live` are not checked: its pages of the chunk are dropped,
        as are the pages of a row that has failed. Pages whose copies have ended go on to the disk.
        """
        if self._disk is not None:
            self._disk.poll()
            self._forget_lost()
        self._invalidate(row for row in rows if row.state is RowState.FAILED)
        if chunk:
            self._read(step, {row for row in live if row.state is not RowState.FAILED})

    def leave(self, rows: Sequence[DecodingRow], unread: Iterable[tuple[DecodingRow, int]]) -> None:
        """Save prompts and replies of the rows that leave their places.

        Of the tokens that queued steps add, `unread`, it is not known yet if they are finite.
        """
        queued = Counter[DecodingRow]()
        for row, added in unread:
            queued[row] += added
        self._ending = {
            row: tokens for row, tokens in self._ending.items() if row.state is RowState.LIVE
        }
        for place, row in enumerate(rows):
            known = None if row.runs_on else self._tokens.pop(row, None)
            if known is None or row.state is RowState.FAILED:
                continue
            if row.state is RowState.LIVE:
                self._ending[row] = known
            count = min(row.filled - queued[row], len(row.token_ids))
            if self._exact:
                count = min(count, row.exact_prefix_len)
            if count > 0:
                tokens = TokenIdentities(known.root, row.token_ids[:count], row.request.images)
                self._save(tokens, row, place, count)

    def _invalidate(self, rows: Iterable[DecodingRow]) -> None:
        """Forget the prefixes of rows that failed: they may be at fault."""
        for row in rows:
            tokens = self._tokens.pop(row, None) or self._ending.pop(row, None)
            if tokens is not None and row.reused:
                self._drop(self._index.match(tokens, row.reused).pages[:1])

    def abort(self) -> None:
        """Forget the matches of all rows, which are lost, and pages not known to be finite."""
        self._tokens.clear()
        self._ending.clear()
        while self._found:
            self._index.release(self._found.popitem()[1].pages)
        self._loads.done()
        while self._unread:
            for pages in self._unread.pop()[1].values():
                self._drop(pages)

    def computed(self, tokens: int, seconds: float) -> None:
        """Record a prefill step of `tokens`, padding included."""
        self._loads.computed(tokens, seconds)

    def take_failures(self) -> list[HearthError]:
        """Take the errors about files since the last call."""
        failures, self._failures = self._failures, []
        return failures if self._disk is None else failures + self._disk.disk_cache.take_failures()

    def close(self) -> None:
        """Write the most recently used pages to disk, as far as time allows, and end."""
        self.abort()
        if self._disk is not None:
            self._disk.close(self._index.unwritten())

    def pin(self, row: RowRequest) -> None:
        """Keep the prompt of a row for its client; raises `cache_full` with the field `cache`."""
        self._index.pin(row.client, self._identities(row), row.prompt_length)

    def unpin(self, client: int) -> None:
        """Release all pages that this client keeps."""
        self._index.unpin(client)

    def _match(self, tokens: TokenIdentities, most: int) -> Match:
        """Longest cached prefix of a row whose numbers are known to be finite."""
        match = self._index.match(tokens, most)
        unread = {page for _, rows in self._unread for pages in rows.values() for page in pages}
        sure = next((n for n, page in enumerate(match.pages) if page in unread), len(match.pages))
        return match.cut(sure * PAGE_TOKENS)

    def _drop(self, pages: Iterable[Page]) -> None:
        for page in pages:
            self._apply(self._index.drop(page), 0)

    def _save(
        self, tokens: TokenIdentities, row: DecodingRow, place: int, count: int
    ) -> list[Page]:
        """Save the pages of a row's first tokens that the index has not, and return them."""
        entries = self._drafted(row) if self._drafted and self._pool.has_draft else 0
        changes = self._index.insert(tokens, count, min(count, entries + 1) if entries else 0)
        try:
            self._apply(changes, place)
        except BaseException:
            # It is unknown which of them were copied.
            self._drop(change.page for change in changes if not isinstance(change, Erase))
            raise
        return [change.page for change in changes if isinstance(change, Save)]

    def _apply(self, changes: Sequence[Change], place: int) -> None:
        """Carry out changes of the index in their order; saves read the row at `place`."""
        saves: list[Save] = []
        for change in changes:
            if isinstance(change, Save):
                saves.append(change)
                continue
            # Each reads its place before the next one writes there.
            self._pool.save(saves, place)
            saves.clear()
            if isinstance(change, Move):
                self._pool.move(change.source, change.target)
            elif self._disk is not None:
                if isinstance(change, Write):
                    self._disk.write(change.page, change.source)
                else:
                    self._disk.erase(change.name)
        self._pool.save(saves, place)
        self._forget_lost()

    def _forget_lost(self) -> None:
        """Take pages that could not be written off the disk."""
        while self._disk is not None and (lost := self._disk.take_lost()):
            for page in lost:
                for change in self._index.not_written(page):
                    self._disk.erase(change.name)

    def _invalidate_damaged(self) -> None:
        """Forget pages whose files gave an error, and all behind them."""
        for page, error in self._loads.take_damaged():
            self._metrics.damaged += 1
            self._failures.append(error)
            self._drop([page])

    def _identities(self, request: RowRequest) -> TokenIdentities:
        return TokenIdentities(self._root(request), request.token_ids, request.images)

    def _root(self, request: RowRequest) -> bytes:
        options = request.options
        adapter = self._digest_of(options.adapter).encode()
        return root_name(self._engine, adapter, options.cache_salt)

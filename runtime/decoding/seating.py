"""Rows take and leave their places, everywhere at once, with what the prefix cache has of them."""

from collections.abc import Iterable, Sequence

from runtime.arrangement import RowOwner
from runtime.decoding.metrics import StageMetrics
from runtime.decoding.speculative import PendingRound
from runtime.decoding.tower_turns import PendingTower
from runtime.decoding.vanilla import PendingStep
from runtime.prefix.prefix_cache import PrefixCache
from runtime.request import RowRequest, RowToken
from runtime.rows import DecodingInferenceContext, DecodingRow, RowState


class Seating:
    """Lets rows move in everything that keeps state by their places, the `owners`.

    With a prefix cache a row takes its place with what is known of it, and leaves with what it has
    computed saved.
    """

    def __init__(
        self,
        context: DecodingInferenceContext,
        owners: Sequence[RowOwner],
        prefix: PrefixCache | None,
        metrics: StageMetrics,
    ) -> None:
        self.owners = list(owners)
        self._context = context
        self._prefix = prefix
        self._metrics = metrics

    def arrange(self, queued: Iterable[PendingStep | PendingTower]) -> bool:
        """Let rows that ended leave and new ones take their places; whether any go on.

        `queued` are the steps whose tokens nobody has read.
        """
        context, prefix = self._context, self._prefix
        if context.stays:
            return bool(context.rows)
        steps = list(queued)
        unread = [pair for step in steps for pair in zip(step.rows, step.lengths, strict=True)]
        if prefix is not None:
            prefix.leave(context.rows, unread)
            self._metrics.reused += prefix.look_up(context.coming)
        arrangement = context.arrange(unread, max((step.padding for step in steps), default=0))
        if arrangement is not None:
            for owner in self.owners:
                owner.rearrange(arrangement)
        if prefix is not None:
            prefix.fill(context.rows)
        return bool(context.rows)

    def prefilled(self, chunk: PendingStep) -> None:
        """A chunk was queued: save the pages that it fills."""
        if self._prefix is not None:
            self._prefix.chunk(chunk, chunk.rows, chunk.first)

    def collected(
        self,
        step: PendingStep | PendingRound,
        live: Sequence[DecodingRow],
        tokens: Iterable[RowToken],
    ) -> dict[int, int]:
        """The tokens of a step are known: how many tokens of a row, by its number, were reused.

        That is told with a row's first token. Of rows that were not `live` any more nobody looks at
        the numbers: what the step left of them is not kept, nor of a row that has failed.
        """
        if self._prefix is None:
            return {}
        self._prefix.turn()
        failed = [row for row in step.rows if row.state is RowState.FAILED]
        self._prefix.doubt(failed)
        if step.kind != "prefill":
            return {}
        self._prefix.read(step, {row for row in live if row.state is not RowState.FAILED})
        begun = {token.row for token in tokens if token.error is None}
        return {row.number: row.reused for row in step.rows if row.reused and row.number in begun}

    def computed(self, tokens: int, seconds: float) -> None:
        """A prefill step has computed so many tokens, those of padding included."""
        if self._prefix is not None:
            self._prefix.computed(tokens, seconds)

    def close(self) -> None:
        """Let what is worth it go to disk; all rows have left."""
        if self._prefix is not None:
            self._prefix.close()

    def pin(self, rows: Iterable[RowRequest]) -> None:
        """Keep the prompts of rows that ask for it; raises `cache_full`."""
        for row in rows:
            if self._prefix is not None and row.options.cache == "pin":
                self._prefix.pin(row)

    def unpin(self, client: int) -> None:
        """Keep nothing for a client any more."""
        if self._prefix is not None:
            self._prefix.unpin(client)

    def give_up(self) -> None:
        """All rows are lost: forget what was found for those that come."""
        if self._prefix is not None:
            self._prefix.give_up()

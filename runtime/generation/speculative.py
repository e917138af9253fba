import time
from collections.abc import Sequence

import msgspec

from hearth.runtime.batch import DecodingInferenceContext, DecodingRow, RowState
from hearth.runtime.device.device import AcceptedPath, BatchSampler, PendingPaths, TreeBuffers
from hearth.runtime.generation.in_flight import AnyStep, InFlightStep
from hearth.runtime.request import RowRound, RowToken
from hearth.runtime.runner.engine_runner import LLMEngineRunner
from hearth.runtime.sampling import TokenMasks
from hearth.runtime.speculation.policy import EagleGenerationMetrics, SpeculationPolicy
from hearth.runtime.speculation.proposer import Proposer

_NOTHING = AcceptedPath([], [])
"""Path of a row whose step gave numbers that are not finite."""


class VerifiedTrees(msgspec.Struct):
    """The trees of a verify step, and what was kept of them once it is collected.

    `sizes` counts the nodes of each row's tree, `width` those of a row in the step; `pure` means
    that no row declined speculation. Times are in seconds of the monotonic clock.
    """

    paths: PendingPaths
    sizes: list[int]
    width: int
    pure: bool
    drafted: float
    kept: int = 0
    verified: float = 0.0
    committed: float = 0.0


VerifyStep = InFlightStep[VerifiedTrees]


class SpeculativeStrategy:
    """Verify steps: propose a token tree a row, run all nodes in one step, commit the best."""

    def __init__(
        self,
        runner: LLMEngineRunner,
        sampler: BatchSampler,
        trees: TreeBuffers,
        proposer: Proposer,
        policy: SpeculationPolicy | None,
    ) -> None:
        self.metrics = EagleGenerationMetrics()
        self.proposer = proposer
        self._runner = runner
        self._sampler = sampler
        self._trees = trees
        self._policy = policy
        self._wishes: list[bool] = []
        self._on_gpu = runner.get_engine_config().device == "cuda"

    def wanted(self, context: DecodingInferenceContext) -> bool:
        """Return True if the decoding rows are to verify next, by the tokens known so far."""
        rows = context.decoders
        speculating = self._wishes = self._speculating(rows)
        return any(speculating) and self.proposer.ready(rows, speculating)

    def verify_step(self, context: DecodingInferenceContext) -> VerifyStep:
        """Queue a step that is `wanted` of the decoding rows; all their tokens must be known."""
        started = time.monotonic()
        rows, speculating = context.decoders, self._wishes
        sizes = self.proposer.propose(rows, speculating, self._trees)
        drafted = time.monotonic()
        width = self._trees.ids.shape[1] if self._on_gpu else max(sizes)
        self._runner.execute_eagle_base_tree_decoding_step(len(rows), width)
        # Made while the device runs the nodes.
        masks = self._masks(rows, width) if context.masked else []
        paths = self._sampler.verify(len(rows), width, masks)
        host_s = time.monotonic() - started
        trees = VerifiedTrees(paths, sizes, width, all(speculating), drafted)
        # Queued in vain, where a row ends, it takes the device no longer than a wait for the host.
        if context.stays and not context.joiners:
            self.proposer.ahead(rows, speculating, paths, width)
        return InFlightStep("verify", rows, trees, started, host_s)

    def follow(self, step: AnyStep) -> None:
        """Let the proposer keep step with what was queued without it."""
        if step.kind == "prefill":
            self.proposer.prefilled(step.rows, step.lengths, step.width, step.first)
        else:
            self.proposer.stepped(step.rows)

    def collect(self, step: VerifyStep) -> list[RowToken]:
        """Wait for the paths, hand their tokens to the rows, and commit them."""
        if step.error is not None:
            raise step.error
        trees = step.event
        found = trees.paths.result()
        tokens: list[RowToken] = []
        rounds: list[RowRound] = []
        for row, size, path in zip(step.rows, trees.sizes, found, strict=True):
            live = row.state is RowState.LIVE
            if path is None and size > 1:
                # A node that vanilla decoding would never run may have spoiled the others: nothing
                # times infinity is not a number. The row goes on without trees.
                row.speculation_disabled = True
                continue
            gained = _take(row, path)
            tokens += gained
            if live and size > 1 and path is not None:
                rounds.append(RowRound(row.number, size - 1, len(gained)))
        step.rounds = rounds
        trees.verified = time.monotonic()
        self._commit(step.rows, [(path or _NOTHING).nodes for path in found], trees.width)
        trees.kept = sum(len(path.nodes) for path in found if path is not None)
        trees.committed = time.monotonic()
        return tokens

    def record(self, step: VerifyStep) -> None:
        """Count a step that was collected, and tell the policy of it.

        One with vanilla rows in it says nothing of speculation.
        """
        trees = step.event
        self.metrics.record(
            step.rounds,
            draft_s=trees.drafted - step.started,
            verify_s=trees.verified - trees.drafted,
            commit_s=trees.committed - trees.verified,
        )
        if self._policy is not None and trees.pure:
            seconds = trees.committed - step.started
            self._policy.record_round(len(step.rows), trees.kept, seconds)

    def capture(self, batch_sizes: Sequence[int]) -> None:
        """Capture the proposer's steps and the verification of its trees, between batches."""
        widths = self.proposer.capture(batch_sizes)
        self._runner.capture_eagle_base_tree_decoding_graph(batch_sizes, widths)

    def record_step(self, batch: int, seconds: float) -> None:
        """Tell the policy of a decode step."""
        if self._policy is not None:
            self._policy.record_step(batch, seconds)

    def _commit(
        self, rows: Sequence[DecodingRow], nodes: Sequence[Sequence[int]], width: int
    ) -> None:
        """Keep the accepted nodes of every row, here and in the proposer."""
        self._runner.commit_path(nodes)
        for place, (row, path) in enumerate(zip(rows, nodes, strict=True)):
            # A path ascends from node 0: one without gaps ends at its length.
            if path and path[-1] >= len(path):
                apart = next(index for index, node in enumerate(path) if node != index)
                row.exact_prefix_len = min(row.exact_prefix_len, row.filled + apart)
            row.filled += len(path)
            if not path:
                self._runner.get_kv_cache().zero_behind(place)
                self.proposer.zero_row(place, row)
        self.proposer.accepted(rows, nodes, width)

    def _masks(self, rows: Sequence[DecodingRow], width: int) -> list[TokenMasks]:
        """Masks of the nodes of each row; on a GPU, which makes trees itself, of node 0 alone."""
        if self._on_gpu:
            return [row.tree_masks() for row in rows]
        shape = len(rows), width
        ids, parents = (one.view(shape).tolist() for one in (self._trees.ids, self._trees.parents))
        return [row.tree_masks(ids[place], parents[place]) for place, row in enumerate(rows)]

    def _speculating(self, rows: Sequence[DecodingRow]) -> list[bool]:
        default = self._policy is None or self._policy.wants(len(rows))
        asked = (row.options.speculation for row in rows)
        wanted = (default if one is None else one for one in asked)
        return [
            one and not row.speculation_disabled and not (self._on_gpu and row.matcher)
            for one, row in zip(wanted, rows, strict=True)
        ]


def _take(row: DecodingRow, path: AcceptedPath | None) -> list[RowToken]:
    """Hand a path to its row; what lies behind the row's end is dropped by it."""
    if path is None:
        report = row.take(None)
        return [] if report is None else [report]
    row.remaining_budget -= len(path.samples)
    reports = [row.take(sample) for sample in path.samples]
    return [report for report in reports if report is not None]

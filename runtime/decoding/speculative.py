import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

from runtime.decoding.vanilla import PendingStep
from runtime.device.device import AcceptedPath, BatchSampler, PendingPaths, TreeBuffers
from runtime.drafting.metrics import EagleGenerationMetrics
from runtime.drafting.policy import SpeculationPolicy
from runtime.drafting.proposer import Proposer
from runtime.errors import HearthError
from runtime.request import RowRound, RowToken
from runtime.rows import DecodingInferenceContext, DecodingRow, RowState, all_left
from runtime.steps.engine_runner import LLMEngineRunner

_NOTHING = AcceptedPath([], [])
"""What a row has of a round whose numbers are not finite."""


class RoundPlan(NamedTuple):
    """A round as it was queued: its rows with the size of each tree, and when.

    `width` counts the nodes a row in the step, `pure` means that no row declined speculation.
    """

    rows: list[DecodingRow]
    sizes: list[int]
    width: int
    pure: bool
    started: float
    drafted: float


class SpeculativeStrategy:
    """Rounds of speculation: propose a token tree a row, verify all nodes in one step, commit."""

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

    def wanted(self, context: DecodingInferenceContext) -> bool:
        """Whether the decoding rows are to take a round next, as far as the known tokens say."""
        rows = context.decoders
        speculating = self._wishes = self._speculating(rows)
        return any(speculating) and self.proposer.ready(rows, speculating)

    def round(self, context: DecodingInferenceContext) -> "PendingRound":
        """Queue a round of the decoding rows, which is `wanted`; all their tokens must be known."""
        started = time.monotonic()
        rows, speculating = context.decoders, self._wishes
        sizes = self.proposer.propose(rows, speculating, self._trees)
        drafted = time.monotonic()
        fixed = self._runner.get_engine_config().device == "cuda"
        width = self._trees.ids.shape[1] if fixed else max(sizes)
        self._runner.execute_eagle_base_tree_decoding_step(len(rows), width)
        paths = self._sampler.verify(len(rows), width)
        plan = RoundPlan(rows, sizes, width, all(speculating), started, drafted)
        pending = PendingRound(self, plan, paths)
        # Queued in vain, where a row ends, it takes the device no longer than a wait for the host.
        if context.stays and not context.joiners:
            self.proposer.ahead(rows, speculating, paths, width)
        return pending

    def follow(self, step: PendingStep) -> None:
        """Let the proposer keep step with what was queued without it."""
        if step.kind == "prefill":
            self.proposer.prefilled(step.rows, step.lengths, step.width, step.first)
        else:
            self.proposer.stepped(step.rows)

    def capture(self, batch_sizes: Sequence[int]) -> None:
        """Capture the proposer's steps and the verification of its trees, between batches."""
        widths = self.proposer.capture(batch_sizes)
        self._runner.capture_eagle_base_tree_decoding_graph(batch_sizes, widths)

    def record_step(self, batch: int, seconds: float) -> None:
        """Tell the policy of a decode step."""
        if self._policy is not None:
            self._policy.record_step(batch, seconds)

    def finish(self, plan: RoundPlan, paths: Sequence[AcceptedPath]) -> tuple[float, float]:
        """Keep the accepted nodes of every row, here and in the proposer.

        When the paths were known, and when all of it was done.
        """
        verified = time.monotonic()
        nodes = [path.nodes for path in paths]
        self._runner.commit_path(nodes)
        for place, (row, path) in enumerate(zip(plan.rows, nodes, strict=True)):
            # A path ascends from node 0: one without gaps ends at its length.
            if path and path[-1] >= len(path):
                apart = next(index for index, node in enumerate(path) if node != index)
                row.certain = min(row.certain, row.filled + apart)
            row.filled += len(path)
            if not path:
                self._runner.get_kv_cache().zero_behind(place)
                self.proposer.zero_row(place, row)
        self.proposer.accepted(plan.rows, nodes, plan.width)
        return verified, time.monotonic()

    def record_round(self, plan: RoundPlan, tokens: int, seconds: float) -> None:
        """Tell the policy of a round; one with vanilla rows in it says nothing of speculation."""
        if self._policy is not None and plan.pure:
            self._policy.record_round(len(plan.rows), tokens, seconds)

    def _speculating(self, rows: Sequence[DecodingRow]) -> list[bool]:
        default = self._policy is None or self._policy.wants(len(rows))
        asked = (row.options.speculation for row in rows)
        wanted = (default if one is None else one for one in asked)
        return [one and not row.plain for one, row in zip(wanted, rows, strict=True)]


class PendingRound:
    """A round that was queued, and what it gave once it is collected."""

    kind: Literal["verify"] = "verify"

    def __init__(self, strategy: SpeculativeStrategy, plan: RoundPlan, paths: PendingPaths) -> None:
        self.rounds: list[RowRound] = []
        self.filled = self.computed = 0
        self.rows = plan.rows
        self.started = plan.started
        self.host_s = time.monotonic() - plan.started
        self._strategy = strategy
        self._plan = plan
        self._paths = paths
        self._known = self._ended = 0.0

    def collect(self) -> list[RowToken]:
        """Wait for the paths, hand their tokens to the rows, and commit them."""
        found = self._paths.result()
        tokens: list[RowToken] = []
        for row, size, path in zip(self.rows, self._plan.sizes, found, strict=True):
            live = row.state is RowState.LIVE
            if path is None and size > 1:
                # A node that vanilla decoding would never run may have spoiled the others: nothing
                # times infinity is not a number. The row goes on without trees.
                row.plain = True
                continue
            gained = _take(row, path)
            tokens += gained
            if live and size > 1 and path is not None:
                self.rounds.append(RowRound(row.number, size - 1, len(gained)))
        paths = [path or _NOTHING for path in found]
        self.filled = sum(len(path.nodes) for path in paths)
        self._known, self._ended = self._strategy.finish(self._plan, paths)
        return tokens

    def drop(self) -> None:
        """Let the round end, whose rows have all left."""
        self.collect()

    def count(self) -> None:
        """Count the round, once it is collected."""
        plan = self._plan
        self._strategy.metrics.record(
            self.rounds,
            draft_s=plan.drafted - plan.started,
            verify_s=self._known - plan.drafted,
            commit_s=self._ended - self._known,
        )
        self._strategy.record_round(plan, self.filled, self._ended - plan.started)


class FailedRound(PendingRound):
    """In the place of a round that could not be queued."""

    def __init__(self, rows: list[DecodingRow], error: Exception) -> None:
        self.rows = rows
        self._error = error

    def collect(self) -> list[RowToken]:
        """Raise what kept it from being queued."""
        raise self._error

    def drop(self) -> None:
        """Its rows have all left, so nobody else is told of it but where the device is lost."""
        if isinstance(self._error, HearthError) and self._error.code == "device_lost":
            raise self._error


def stands(pending: PendingRound | None) -> bool:
    """Whether a round that could not be queued has rows yet, which the next step ends."""
    return isinstance(pending, FailedRound) and not all_left(pending.rows)


def _take(row: DecodingRow, path: AcceptedPath | None) -> list[RowToken]:
    """Hand a path to its row; what lies behind the row's end is dropped by it."""
    if path is None:
        report = row.take(None)
        return [] if report is None else [report]
    row.unplanned -= len(path.samples)
    reports = [row.take(sample) for sample in path.samples]
    return [report for report in reports if report is not None]

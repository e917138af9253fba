"""Arrangements at random, for whoever owns rows, and runners as a deployment makes them."""

from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st

from hearth.runtime.batch import BatchReorder, DecodingRow, RowMove
from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.device import Device
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.executor.engine_executor import EngineExecutor
from hearth.runtime.request import RequestOptions, RowRequest
from hearth.runtime.runner.engine_runner import LLMEngineRunner
from hearth.runtime.runner.pipeline_io import PipelineIO
from hearth.runtime.runner.shared_resources import SharedResources

REQUEST = RowRequest(token_ids=[1, 2, 3], prompt_length=3, options=RequestOptions())


def new_row(place: int, request: RowRequest = REQUEST, filled: int = 0) -> tuple[int, DecodingRow]:
    """An assignment of a row that asks for this, with a prefix of `filled` tokens."""
    row = DecodingRow(place, request, len(request.token_ids), frozenset())
    row.filled = filled
    return place, row


def keep(*places: int) -> BatchReorder:
    """The rows at these places stay, in this order; the others leave."""
    moves = [RowMove(*pair, 0) for pair in zip(places, range(len(places)), strict=True)]
    return BatchReorder(len(places), moves)


@st.composite
def arrangements(
    draw: st.DrawFn, lengths: Sequence[int], limit: int, longest: int = 0
) -> BatchReorder:
    """Any reorder of rows of these lengths in a house of `limit` places.

    New ones come with a prefix of up to `longest` tokens.
    """
    staying = [place for place in range(len(lengths)) if draw(st.booleans())]
    taken, moves = set(staying), []
    for source in draw(st.permutations(staying)):
        free = [place for place in range(limit) if place not in taken]
        target = draw(st.sampled_from([source, *free]))
        if target != source:
            moves.append(RowMove(source, target, lengths[source]))
            taken ^= {source, target}
    rows = draw(st.integers(max(taken, default=-1) + 1, limit))
    assignments = [
        new_row(place, filled=draw(st.integers(0, longest)))
        for place in range(rows)
        if place not in taken
    ]
    return BatchReorder(rows, moves, assignments)


def open_runner(folder: Path, config: LLMEngineRunnerConfig, device: Device) -> LLMEngineRunner:
    """A runner of the engine in `folder`."""
    resources = SharedResources.create_for_llm(config, folder, device)
    return LLMEngineRunner(
        config,
        EngineExecutor.create_for_llm(folder, config, EngineOptions(threads=1), device),
        PipelineIO.create_for_llm(config, resources, device),
        resources,
        device,
    )

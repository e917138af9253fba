"""Greedy tokens of two engines that round differently: where they part, and by how little."""

from typing import NamedTuple

from msgspec import structs

from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.request import GenerationRequest, RequestOptions, RowRequest

GREEDY = RequestOptions(logprobs=2)
"""Greedy, with what the lead of each token over the second is read from."""


class Reference(NamedTuple):
    """Greedy tokens of a row and by how much each one's log probability led the second's."""

    tokens: list[int]
    leads: list[float]


class Divergence(NamedTuple):
    """A row that parted from its reference at token `place`, which had led by `lead`."""

    row: int
    place: int
    lead: float


def greedy_row(token_ids: list[int], max_tokens: int, *, ignore_eos: bool = False) -> RowRequest:
    """A row to generate greedily."""
    return RowRequest(
        token_ids=token_ids,
        prompt_length=len(token_ids),
        options=structs.replace(GREEDY, max_tokens=max_tokens, ignore_eos=ignore_eos),
    )


def references(runtime: LLMInferenceRuntime, rows: list[RowRequest]) -> list[Reference]:
    """What `runtime` gives for each row, in batches as large as it takes."""
    found = []
    for first in range(0, len(rows), runtime.max_batch):
        batch = rows[first : first + runtime.max_batch]
        for row in runtime.handle_request(GenerationRequest(rows=batch)).rows:
            leads = [top[0].logprob - top[1].logprob for top in row.top_logprobs]
            found.append(Reference(row.token_ids, leads))
    return found


def divergences(ours: list[list[int]], wanted: list[Reference]) -> list[Divergence]:
    """Where rows part from their references; what follows in such a row is not compared."""
    found = []
    for row, (tokens, reference) in enumerate(zip(ours, wanted, strict=True)):
        pairs = zip(tokens, reference.tokens, strict=False)
        place = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        if place is not None:
            found.append(Divergence(row, place, reference.leads[place]))
        elif len(tokens) != len(reference.tokens):
            found.append(Divergence(row, min(len(tokens), len(reference.tokens)), float("inf")))
    return found

"""Rows alone, and a row's reply beside the one that it has alone."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from hearth.runtime.images import EmbeddedImage
from hearth.runtime.request import RequestOptions, RowRequest, RowToken
from hearth.runtime.sampling import RowSampler
from tests.runtime.generation.schedules.schedule import PlannedRow
from tests.runtime.generation.schedules.trial import INJECTED, JoiningRuntime, Reply, ViolationError

Logits = NDArray[np.float32]
_MOST_LOGPROBS = 20
_DIRECTIONS = 40
_HALVINGS = 20
_DEVIATION = 10
"""By how many near-ties a log probability may be off."""


class Voice(msgspec.Struct, frozen=True):
    """What a row's text depends on: its prompt with its images, how its tokens are picked."""

    prompt: tuple[int, ...]
    options: RequestOptions
    images: tuple[EmbeddedImage, ...] = ()

    def row(self, plan: PlannedRow) -> RowRequest:
        """The request of a planned row."""
        options = structs.replace(
            self.options,
            max_tokens=plan.tokens or None,
            logprobs=plan.logprobs,
            speculation=plan.speculation,
        )
        prompt = list(self.prompt)
        return RowRequest(
            token_ids=prompt,
            prompt_length=len(prompt),
            options=options,
            images=list(self.images),
        )


class Alone(NamedTuple):
    """The reply to a row that was alone, and the logits [V] of each of its tokens."""

    reply: Reply
    logits: list[Logits]


def run_alone(
    runtime: JoiningRuntime, voice: Voice, tokens: int, logits: Callable[[], Logits]
) -> Alone:
    """Let a row run alone; `logits` reads those of the step before."""
    plan = PlannedRow(voice=0, arrives=0, tokens=tokens, logprobs=_MOST_LOGPROBS)
    found = Alone(Reply(), [])
    runtime.admit([voice.row(plan)])
    while runtime.active:
        for token in runtime.step().tokens:
            if token.error is None:
                found.reply.tokens.append(token)
                found.logits.append(logits())
            found.reply.end = token.error or token.finish or ""
    return found


class Verdict(NamedTuple):
    """How a reply differs: by how much its log probabilities, and where by what lead its tokens.

    `gap` is the change of logits that explains the other token, None where no token differs.
    """

    compared: int
    deviation: float = 0.0
    gap: float | None = None


def judge(
    reply: Reply, request: RowRequest, longest: int, alone: Alone, near_tie: float
) -> Verdict:
    """Compare a reply with the one alone; raises `ViolationError` where they may not differ.

    `longest` is the most tokens that the row may get. A `near_tie` of 0 asks for equal bits.
    """
    deviation = 0.0
    count = request.options.logprobs
    if len(reply.tokens) > longest:
        raise ViolationError(f"{len(reply.tokens)} tokens, {longest} were asked for")
    for place, (ours, wanted) in enumerate(zip(reply.tokens, alone.reply.tokens, strict=False)):
        if ours.token_id != wanted.token_id:
            gap = None
            if near_tie:
                before, logits = reply.tokens[:place], alone.logits[place]
                gap = _gap(request, before, logits, ours.token_id, near_tie)
            if gap is None:
                raise ViolationError(
                    f"token {place} is {ours.token_id}, {wanted.token_id} alone: no near-tie "
                    f"(log probabilities before were off by {deviation})"
                )
            return Verdict(place, deviation, gap)
        if count is None:
            _expect(ours.logprob, None, place)
            continue
        off = _deviation(ours, wanted, count)
        if off > _DEVIATION * near_tie or (not near_tie and ours.top != wanted.top[:count]):
            raise ViolationError(f"log probabilities of token {place} are off by {off}")
        deviation = max(deviation, off)
    _check_end(reply, longest, alone.reply)
    return Verdict(len(reply.tokens), deviation)


def _check_end(reply: Reply, longest: int, alone: Reply) -> None:
    known = len(alone.tokens)
    found = len(reply.tokens)
    if reply.end in {"cancelled", INJECTED}:
        if found > known:
            raise ViolationError(f"{found} tokens, {known} alone")
        return
    ends_alone = known < longest or (known == longest and alone.end == "stop")
    wanted = (known, alone.end) if ends_alone else (longest, "length")
    if (found, reply.end) != wanted:
        raise ViolationError(f"{(found, reply.end)} tokens and end, alone {wanted}")


def _expect(found: Any, wanted: Any, place: int) -> None:
    if found != wanted:
        raise ViolationError(f"token {place}: {found}, {wanted} is expected")


def _deviation(ours: RowToken, wanted: RowToken, count: int) -> float:
    """By how much log probabilities differ; alternatives that both name are compared."""
    if ours.logprob is None or wanted.logprob is None or len(ours.top) != count:
        return float("inf")
    off = abs(ours.logprob - wanted.logprob)
    for one, other in zip(ours.top, wanted.top, strict=False):
        # Of equal rank: two that are near each other may have changed places.
        off = max(off, abs(one.logprob - other.logprob))
    return off


def _gap(
    request: RowRequest,
    before: Sequence[RowToken],
    logits: Logits,
    token_id: int,
    near_tie: float,
) -> float | None:
    """By how much logits have to differ for this token to be picked; None for more than a near-tie.

    Each logit moves by half of that, so it is the lead of a token that is picked greedily.
    """
    history = [*request.token_ids, *(token.token_id for token in before)]

    def pick(moved: Logits) -> int:
        sampler = RowSampler(request.options, history, request.prompt_length, logits.size)
        return sampler.pick(moved, int(moved.argmax()), len(history)) or 0

    found = (
        _least(pick, logits, np.float32(near_tie / 2) * direction, token_id)
        for direction in _directions(logits.size, pick(logits), token_id)
    )
    share = min((one for one in found if one is not None), default=None)
    return None if share is None else share * near_tie


def _least(
    pick: Callable[[Logits], int], logits: Logits, move: Logits, token_id: int
) -> float | None:
    """The least share of a move, about, with which a token is picked; None where none does.

    A draw goes through the tokens in the order of ids as the share grows, and stays with an
    unlikely one for a moment, so that is looked for between two shares that miss it on either side.
    """
    low, high = 0.0, 1.0
    below, above = pick(logits), pick(logits + move)
    if above == token_id:
        # What is near enough may be nearer still.
        return next(
            (
                one
                for one in (0.001, 0.01, 0.1)
                if pick(logits + np.float32(one) * move) == token_id
            ),
            1.0,
        )
    if not min(below, above) < token_id < max(below, above):
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        picked = pick(logits + np.float32(middle) * move)
        if picked == token_id:
            return middle
        low, high = (middle, high) if (picked < token_id) == (below < token_id) else (low, middle)
    return None


def _directions(size: int, picked: int, token_id: int) -> Iterator[Logits]:
    """Ways to move logits by 1 at most: towards a token, towards lower and higher ids, at random.

    Draws go by the cumulative weight in the order of ids.
    """
    towards = np.zeros(size, np.float32)
    towards[picked], towards[token_id] = -1, 1
    yield towards
    upward = np.where(np.arange(size) <= min(picked, token_id), -1, 1).astype(np.float32)
    yield upward
    yield -upward
    numbers = np.random.default_rng(0)
    for _ in range(_DIRECTIONS):
        yield numbers.choice(np.array([-1, 1], np.float32), size)

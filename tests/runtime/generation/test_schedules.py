"""The trials themselves: a runtime that keeps its promises passes, each defect is found."""

from collections.abc import Sequence
from random import Random

import msgspec
import numpy as np
import pytest
from msgspec import structs

from hearth.runtime.errors import HearthError
from hearth.runtime.generation.batch_runtime import StepResult
from hearth.runtime.request import FinishReason, RequestOptions, RowRequest, RowToken, TopLogprob
from hearth.runtime.sampling import RowSampler
from tests.runtime.generation.schedules.alone import Alone, Verdict, Voice, judge, run_alone
from tests.runtime.generation.schedules.schedule import Bounds, Choices, Schedule, draw_schedule
from tests.runtime.generation.schedules.trial import Reply, Trial, ViolationError

VOCAB, CHUNK = 40, 8
VOICES = [
    Voice(tuple(Random(number).choices(range(1, VOCAB), k=1 + number % 30)), RequestOptions())
    for number in range(40)
]
BOUNDS = Bounds(voices=len(VOICES), rows=8, tokens=10)
Logits = np.ndarray


def toy_logits(tokens: Sequence[int]) -> Logits:
    logits: Logits = np.random.default_rng(list(tokens)).normal(size=VOCAB).astype(np.float32)
    return logits


class _ToyRow(msgspec.Struct):
    number: int
    tokens: list[int]
    request: RowRequest
    left: int
    others: tuple[int, ...] = ()


class ToyRuntime:
    """Promises kept by a few lines; token 0 ends a row. `defect` names the one that is broken."""

    max_batch = 4

    def __init__(self, failing: Sequence[int] = (), defect: str = "") -> None:
        self.failing = failing
        self.defect = defect
        self.rows: list[_ToyRow] = []
        self.gone: list[int] = []
        self.prefills = self.numbers = 0
        self.lost = 0
        self.turn = False

    @property
    def free(self) -> int:
        return self.max_batch - len(self.rows) - self.lost

    @property
    def active(self) -> bool:
        return bool(self.rows)

    def admit(self, rows: Sequence[RowRequest]) -> list[int]:
        if len(rows) > self.free and self.defect != "overfull":
            raise HearthError("invalid_value", "no place", "rows")
        first = self.numbers
        for row in rows:
            self.rows.append(_ToyRow(self.numbers, list(row.token_ids), row, len(row.token_ids)))
            self.numbers += self.defect != "number" or self.numbers == 0
        return list(range(first, first + len(rows)))

    def leave(self, row: int) -> None:
        self.gone.append(row)
        if self.defect != "leave":
            self.rows = [one for one in self.rows if one.number != row]

    def release(self, row: int) -> list[int] | None:
        found = next(one for one in self.rows if one.number == row)
        self.rows.remove(found)
        tokens = found.tokens[found.request.prompt_length :]
        return tokens[: -1 if self.defect == "release" else None]

    def step(self) -> StepResult:
        joiners = [row for row in self.rows if row.left]
        decoding = [row for row in self.rows if not row.left]
        self.turn = not self.turn
        if joiners and (self.turn or not decoding) and self.defect != "starve":
            return self._prefill(joiners)
        return self._decode(decoding)

    def _prefill(self, joiners: list[_ToyRow]) -> StepResult:
        self.prefills += 1
        if self.prefills - 1 in self.failing:
            hurt = self.rows if self.defect == "harm" else joiners
            self.rows = [row for row in self.rows if row not in hurt]
            self.lost += self.defect == "lost place"
            tokens = [RowToken(row.number, -1, error="executor_failed") for row in hurt]
            return StepResult(
                "prefill", tokens, 0.0, 0.0, failure=HearthError("executor_failed", "")
            )
        ready = []
        for row in joiners:
            row.left -= min(CHUNK, row.left)
            ready += [] if row.left else [row]
        return StepResult("prefill", self._pick(ready), 0.0, 0.0)

    def _decode(self, rows: list[_ToyRow]) -> StepResult:
        return StepResult("decode", self._pick(rows), 0.0, 0.0)

    def _pick(self, rows: list[_ToyRow]) -> list[RowToken]:
        return [self._token(row) for row in list(rows)]

    def _token(self, row: _ToyRow) -> RowToken:
        joined = self.defect in {"text", "bit"} and any(one.left for one in self.rows)
        logits = toy_logits(row.tokens)
        if joined and self.defect == "text":
            logits = logits[::-1].copy()
        options = row.request.options
        token = int(logits.argmax())
        row.tokens.append(token)
        made = len(row.tokens) - row.request.prompt_length
        longest = (options.max_tokens or 20) + (self.defect == "limit")
        finish: FinishReason | None = (
            "stop" if token == 0 else "length" if made >= longest else None
        )
        if finish:
            self.rows.remove(row)
        count, logprob = options.logprobs, float(logits[token])
        if count is None:
            return RowToken(row.number, token, finish=finish)
        if joined:
            logprob = float(np.nextafter(logits[token], np.float32(9)))
        ranked = np.argsort(-logits)[:count].tolist()
        top = tuple(TopLogprob(one, float(logits[one])) for one in ranked)
        return RowToken(row.number, token, logprob, top, finish)


ALONE = [
    run_alone(ToyRuntime(), voice, 20, lambda: np.zeros(VOCAB, np.float32)) for voice in VOICES
]


def schedule_of(number: int) -> Schedule:
    return draw_schedule(Choices(Random(number).randbytes(200)), BOUNDS)


def trial(schedule: Schedule, defect: str = "") -> list[str]:
    """How the rows ended, each compared with itself alone."""
    runtime = ToyRuntime(
        schedule.failing if schedule.fault not in {"none", "decode"} else (), defect
    )
    requests = [VOICES[plan.voice].row(plan) for plan in schedule.rows]
    replies = Trial(runtime, schedule, requests).run()
    for plan, request, reply in zip(schedule.rows, requests, replies, strict=True):
        judge(reply, request, plan.tokens or 20, ALONE[plan.voice], 0.0)
    return [reply.end for reply in replies]


def test_a_runtime_that_keeps_its_promises_passes() -> None:
    ends = [end for number in range(200) for end in trial(schedule_of(number))]
    assert {"stop", "length", "cancelled", "executor_failed"} == set(ends)


@pytest.mark.parametrize(
    "defect",
    [
        "text",
        "bit",
        "limit",
        "release",
        "leave",
        "overfull",
        "number",
        "harm",
        "lost place",
        "starve",
    ],
)
def test_each_defect_is_found(defect: str) -> None:
    def all_trials() -> None:
        for number in range(200):
            trial(schedule_of(number), defect)

    with pytest.raises(ViolationError):
        all_trials()


def test_a_schedule_is_drawn_again_from_its_number() -> None:
    assert schedule_of(7) == schedule_of(7) != schedule_of(8)


def test_no_bytes_make_the_simplest_schedule() -> None:
    (row,) = draw_schedule(Choices(b""), BOUNDS).rows
    assert (row.voice, row.arrives, row.tokens, row.absences, row.cancel) == (0, 0, 1, (), None)


def judged(request: RowRequest, logits: Logits, token: int, near_tie: float) -> Verdict:
    """A row that was given `token` where these logits alone gave another."""
    best = RowSampler(request.options, request.token_ids, 2, VOCAB).pick(
        logits, int(logits.argmax()), 2
    )
    assert best is not None
    wanted = Alone(Reply([RowToken(0, best, finish="length")], "length"), [logits])
    return judge(
        Reply([RowToken(0, token, finish="length")], "length"), request, 1, wanted, near_tie
    )


@pytest.mark.parametrize("lead", [1e-6, 5e-5, 2e-4, 1.0])
def test_a_greedy_token_may_differ_at_a_near_tie_alone(lead: float) -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[5], logits[9] = 1, 1 - lead
    request = RowRequest(token_ids=[3, 4], prompt_length=2)
    if lead < 1e-4:
        gap = judged(request, logits, 9, 1e-4).gap
        assert gap is not None
        assert lead <= gap <= 1e-4
    else:
        with pytest.raises(ViolationError, match="no near-tie"):
            judged(request, logits, 9, 1e-4)
    with pytest.raises(ViolationError, match="no near-tie"):
        judged(request, logits, 9, 0.0)


@pytest.mark.parametrize(
    "options",
    [
        RequestOptions(temperature=0.9),
        RequestOptions(temperature=0.9, top_k=7, presence_penalty=0.5),
        RequestOptions(temperature=1.2, top_p=0.8, repetition_penalty=1.2),
    ],
)
def test_a_drawn_token_may_differ_where_a_small_change_draws_it(options: RequestOptions) -> None:
    numbers = np.random.default_rng(5)
    explained = parted = 0
    for seed in range(1000):
        logits = numbers.normal(size=VOCAB).astype(np.float32)
        moved = logits + numbers.uniform(-1e-2, 1e-2, VOCAB).astype(np.float32)
        request = RowRequest(
            token_ids=[3, 4], prompt_length=2, options=structs.replace(options, seed=seed)
        )
        sampler = RowSampler(request.options, [3, 4], 2, VOCAB)
        ours = sampler.pick(moved, int(moved.argmax()), 2)
        assert ours is not None
        if sampler.pick(logits, int(logits.argmax()), 2) != ours:
            parted += 1
            explained += judged(request, logits, ours, 2e-2).gap is not None
        if seed < 10:
            with pytest.raises(ViolationError):
                judged(request, logits, (ours + 20) % VOCAB, 2e-2)
    assert explained == parted > 0


def test_an_unlikely_token_may_be_drawn_between_two_that_are_likely() -> None:
    logits = np.full(VOCAB, -30, np.float32)
    logits[[3, 10, 20]] = 1, -9, 1
    moved = logits + np.where(np.arange(VOCAB) < 10, -1e-2, 1e-2).astype(np.float32)
    found = 0
    for seed in range(2000):
        options = RequestOptions(temperature=1.0, seed=seed)
        request = RowRequest(token_ids=[3, 4], prompt_length=2, options=options)
        sampler = RowSampler(options, [3, 4], 2, VOCAB)
        if sampler.pick(logits, 3, 2) == 3 and sampler.pick(moved, 20, 2) == 20:
            found += 1
            gap = judged(request, logits, 10, 2e-2).gap
            assert gap is not None
            assert 0 < gap < 2e-2
    assert found

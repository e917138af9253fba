from collections.abc import Iterator, Sequence

import pytest
from msgspec import structs

from hearth.runtime.errors import HearthError
from hearth.runtime.generation.batch_runtime import StepResult
from hearth.runtime.generation.completion import complete
from hearth.runtime.request import (
    FinishReason,
    GenerationRequest,
    RequestOptions,
    RowRequest,
    RowToken,
    TopLogprob,
)
from hearth.runtime.text.tokenizer import Tokenizer
from tests.actors.fake_runtime import FakeRuntime
from tests.runtime.conftest import EngineFolders

ROW = RowRequest(token_ids=[1], prompt_length=1, options=RequestOptions(max_tokens=99))


def until(stop: str) -> RowRequest:
    return structs.replace(ROW, options=structs.replace(ROW.options, stop=(stop,)))


class _Script(FakeRuntime):
    """Plays back the reports of each step; the first is a prefill."""

    def __init__(self, *steps: list[RowToken]) -> None:
        super().__init__()
        self._script: Iterator[list[RowToken]] = iter(steps)
        self._length = len(steps)
        self._played = 0
        self.left: list[int] = []

    @property
    def active(self) -> bool:
        return self._played < self._length

    def admit(self, rows: Sequence[RowRequest], numbers: Sequence[int] | None = None) -> list[int]:
        return list(numbers or range(len(rows)))

    def step(self) -> StepResult:
        tokens = next(self._script)
        kind = "decode" if self._played else "prefill"
        self._played += 1
        return StepResult("prefill" if kind == "prefill" else "decode", tokens, 1.0, 1.5)

    def leave(self, row: int) -> None:
        assert row not in self.left
        self.left.append(row)


@pytest.fixture
def tokenizer(engine_folders: EngineFolders) -> Tokenizer:
    return Tokenizer.open(engine_folders("qwen3", "classic"))


def _spoken(
    tokenizer: Tokenizer, text: str, finish: FinishReason | None = None
) -> list[list[RowToken]]:
    """One step a token for row 0; the last one ends as `finish`."""
    ids = tokenizer.encode(text)
    steps = [[RowToken(0, token)] for token in ids[:-1]]
    return [*steps, [RowToken(0, ids[-1], finish=finish)]]


def test_reports_are_gathered_by_row() -> None:
    top = (TopLogprob(5, -0.1), TopLogprob(6, -2.0))
    script = _Script(
        [RowToken(1, 7), RowToken(0, 5, -0.1, top)],
        [RowToken(0, 6, -2.0, top, "stop"), RowToken(1, -1, error="non_finite")],
    )
    response = complete(script, GenerationRequest(rows=[ROW, ROW]), None)
    first, second = response.rows
    assert (first.token_ids, first.finish_reason, first.error) == ([5, 6], "stop", None)
    assert (first.logprobs, first.top_logprobs) == ([-0.1, -2.0], [top, top])
    assert (second.token_ids, second.finish_reason, second.error) == ([7], None, "non_finite")
    assert (second.logprobs, second.text) == ([], "")
    assert (response.prefill_s, response.decode_s, response.steps) == (0.5, 0.5, 2)
    assert script.left == []


def test_rounds_of_speculation_count_as_generation() -> None:
    class _Rounds(_Script):
        def step(self) -> StepResult:
            result = super().step()
            result.kind = "verify" if result.kind == "decode" else result.kind
            return result

    script = _Rounds([RowToken(0, 5)], [RowToken(0, 6), RowToken(0, 7)], [RowToken(0, 8)])
    response = complete(script, GenerationRequest(rows=[ROW]), None)
    assert response.rows[0].token_ids == [5, 6, 7, 8]
    assert (response.prefill_s, response.decode_s, response.steps) == (0.5, 1.0, 3)


def test_tokens_become_text(tokenizer: Tokenizer) -> None:
    script = _Script(*_spoken(tokenizer, "the lamp is ön", "length"))
    (row,) = complete(script, GenerationRequest(rows=[ROW]), tokenizer).rows
    assert (row.text, row.finish_reason) == ("the lamp is ön", "length")


@pytest.mark.parametrize("finish", [None, "length"])
def test_a_stop_string_ends_the_row_and_overrides_its_reason(
    tokenizer: Tokenizer, finish: FinishReason | None
) -> None:
    script = _Script(*_spoken(tokenizer, "the lamp is on", finish))
    request = GenerationRequest(rows=[until("on")])
    (row,) = complete(script, request, tokenizer).rows
    assert (row.text, row.finish_reason) == ("the lamp is ", "stop")
    assert script.left == [0]


def test_what_the_same_step_gave_behind_a_stop_string_is_dropped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the lamp is on")
    tokens = [RowToken(0, token) for token in ids]
    tokens.append(RowToken(0, ids[0], finish="length"))
    request = GenerationRequest(rows=[until("lamp")])
    (row,) = complete(_Script([], tokens), request, tokenizer).rows
    assert (row.text, row.finish_reason) == ("the ", "stop")
    assert row.token_ids == ids[: len(row.token_ids)]
    assert len(row.token_ids) < len(ids)


def test_a_beginning_of_a_stop_string_is_released_at_the_end(tokenizer: Tokenizer) -> None:
    script = _Script(*_spoken(tokenizer, "lamp o", "length"))
    request = GenerationRequest(rows=[until("on")])
    (row,) = complete(script, request, tokenizer).rows
    assert (row.text, row.finish_reason) == ("lamp o", "length")


def test_stop_strings_need_a_tokenizer() -> None:
    script = _Script([])
    with pytest.raises(HearthError) as caught:
        complete(script, GenerationRequest(rows=[until("x")]), None)
    assert (caught.value.code, caught.value.field) == ("unsupported_option", "stop")
    assert complete(_Script([]), GenerationRequest(rows=[ROW]), None).steps == 1


def test_the_batch_is_ended_when_a_step_fails() -> None:
    script = _Script([])
    script._length = 2
    with pytest.raises(StopIteration):
        complete(script, GenerationRequest(rows=[ROW]), None)
    assert script.left == [0]

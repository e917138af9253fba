"""Numbers that are not finite where rows join and leave: the row that has them fails alone."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from contextlib import closing as closing_of
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.generation.batch_runtime import StepResult
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.request import RequestOptions, RowRequest
from hearth.runtime.speculation.eagle import EagleProposer
from tests.runtime.generation.schedules.home import Setting, export_home, home_chats, open_runtime
from tests.runtime.kv_cache.arranged_rows import cache_view

CHUNK, LONG, TOKENS, POISON = 16, 100, 12, 1023
SETTINGS = (
    Setting("off", CHUNK, gpu=True),
    Setting("lookup", CHUNK, gpu=True),
    Setting("eagle", CHUNK, gpu=True, tree=(3, 2, 8)),
)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., "House"]]:
    """Gives the house of a dialect and a setting, opened once."""
    with ExitStack() as closing:

        @cache
        def folder(dialect: str) -> Path:
            return export_home(tmp_path_factory.mktemp("poison") / dialect, CHUNK, dialect=dialect)

        @cache
        def house(dialect: str, setting: Setting) -> House:
            runtime = closing.enter_context(closing_of(open_runtime(folder(dialect), setting)))
            return House(runtime, home_chats(folder(dialect)))

        yield house


@pytest.fixture(params=SETTINGS, ids=lambda setting: setting.method)
def house(
    request: pytest.FixtureRequest, opened: Callable[..., "House"], dialect: str
) -> Iterator["House"]:
    if (dialect, request.param.method) == ("classic", "lookup"):
        pytest.skip("rounds of the classic dialect are tried with a draft")
    found = opened(dialect, request.param)
    found.texts, found.errors = {}, {}
    yield found
    found.assert_clean()


def poisoned(row: RowRequest, place: int) -> RowRequest:
    """The row with a token in it that has no finite numbers."""
    tokens = [*row.token_ids[:place], POISON, *row.token_ids[place + 1 :]]
    return RowRequest(token_ids=tokens, prompt_length=len(tokens), options=row.options)


def cut(row: RowRequest, tokens: int) -> RowRequest:
    """The row with so many tokens of its prompt."""
    return RowRequest(token_ids=row.token_ids[:tokens], prompt_length=tokens, options=row.options)


class House:
    """A runtime, and what its rows have got so far, by number.

    `rows` ask for the same number of tokens; those of even places have long prompts.
    """

    def __init__(self, runtime: LLMInferenceRuntime, chats: Sequence[Sequence[int]]) -> None:
        options = RequestOptions(max_tokens=TOKENS, ignore_eos=True)
        self.rows = [
            RowRequest(token_ids=chat, prompt_length=len(chat), options=options)
            for chat in (list(chat[:LONG]) for chat in chats)
        ]
        self.runtime = runtime
        self.caches = runtime._runner.get_kv_cache()
        self.texts: dict[int, list[int]] = {}
        self.errors: dict[int, str] = {}
        self._alone: dict[int, list[int]] = {}

    def alone(self, *places: int) -> list[list[int]]:
        """The texts of rows alone."""
        for place in places:
            if place not in self._alone:
                self._alone[place] = self.text(self.rows[place])
        return [self._alone[place] for place in places]

    def text(self, row: RowRequest) -> list[int]:
        """The text of a row that is alone."""
        (number,) = self.admit(row)
        self.drain()
        assert len(self.texts[number]) == TOKENS
        return self.texts.pop(number)

    def admit(self, *rows: RowRequest) -> list[int]:
        numbers = self.runtime.admit(rows)
        self.texts |= {number: [] for number in numbers}
        return numbers

    def place(self, *places: int) -> list[int]:
        """Admit healthy rows."""
        return self.admit(*(self.rows[place] for place in places))

    def step(self) -> StepResult:
        result = self.runtime.step()
        for token in result.tokens:
            if token.error is None:
                self.texts[token.row].append(token.token_id)
            else:
                self.errors[token.row] = token.error
        return result

    def until(self, number: int, tokens: int) -> None:
        """Step until a row has so many tokens."""
        while len(self.texts[number]) < tokens:
            self.step()

    def drain(self) -> None:
        while self.runtime.active:
            self.step()

    def of(self, numbers: Sequence[int]) -> list[list[int]]:
        return [self.texts[number] for number in numbers]

    def assert_clean(self) -> None:
        """No row was left with numbers that could spoil the row that takes its place next."""
        self.texts, self.errors = {}, {}
        # Short ones: a row reads all slots of the bucket, and writes over few of them.
        self.admit(*(cut(row, 3) for row in self.rows[:8]))
        self.drain()
        assert self.errors == {}
        speculation = self.runtime._speculation
        proposer = None if speculation is None else speculation.proposer
        draft = [proposer._draft.caches] if isinstance(proposer, EagleProposer) else []
        for caches in (self.caches, *draft):
            for tensor in caches.kv.keys + caches.kv.values:
                assert np.isfinite(tensor.array).all()


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [3, 2 * CHUNK + 1, LONG])
def test_a_padded_step_writes_nothing_that_a_joiner_reads(house: House, prompt: int) -> None:
    """What a padded row runs is poisoned, so every slot that it writes has no finite numbers.

    The last chunk of some prompts is narrower than a tree.
    """
    joiner = cut(house.rows[0], prompt)
    expected = [*house.alone(1, 3, 5), house.text(joiner)]
    sampler: Any = house.runtime._vanilla.sampler
    newest, trees = sampler._next_tokens, sampler._trees
    runner = house.runtime._runner
    poisoned_steps = 0

    def poison(run: Any, rows: int, *width: int) -> Any:
        nonlocal poisoned_steps
        batch = runner._steps.padded(rows)
        poisoned_steps += batch > rows
        newest[rows:] = POISON
        if width and trees is not None:
            trees.ids.view((batch, *width))[rows:] = POISON
        return run(rows, *width)

    with ExitStack() as patches:
        for name in ("execute_vanilla_decoding_step", "execute_eagle_base_tree_decoding_step"):
            run = partial(poison, getattr(runner, name))
            patches.enter_context(patch.object(runner, name, run))
        numbers = house.place(1, 3, 5)
        house.until(numbers[-1], 2)
        numbers += house.admit(joiner)
        house.drain()
        newest[...] = 0
        if trees is not None:
            trees.ids.array[...] = 0
    assert poisoned_steps > 0
    assert house.errors == {}
    assert house.of(numbers) == expected


@pytest.mark.parametrize("how", ["cancelled", "released"])
def test_a_prompt_that_is_dropped_between_chunks_leaves_nothing_behind(
    house: House, how: str
) -> None:
    after = (2, 3, 4, 5, 6, 7)
    expected = house.alone(1, *after)
    numbers = house.place(1)
    house.until(numbers[0], 2)
    for place in (2, len(house.rows[0].token_ids) - 1):
        (bad,) = house.admit(poisoned(house.rows[0], place))
        for _ in range(2):
            house.step()
        if bad in house.errors:
            continue
        if how == "cancelled":
            house.runtime.leave(bad)
        else:
            assert house.runtime.release(bad) == []
    numbers += house.place(*after)
    house.drain()
    assert house.of(numbers) == expected
    assert set(house.errors.values()) <= {"non_finite"}


def test_a_joiner_that_is_not_finite_fails_alone(house: House) -> None:
    expected = house.alone(1, 3, 0, 2)
    numbers = house.place(1, 3)
    house.until(numbers[1], 2)
    bad = house.admit(poisoned(house.rows[4], 20), poisoned(house.rows[5], 1))
    numbers += house.place(0, 2)
    house.drain()
    assert house.errors == dict.fromkeys(bad, "non_finite")
    assert house.of(numbers) == expected


@pytest.mark.parametrize("runs", [False, True])
def test_a_chunk_that_raises_takes_its_joiners_alone(house: House, *, runs: bool) -> None:
    expected = house.alone(1, 3, 5, 0)
    numbers = house.place(1, 3)
    house.until(numbers[1], 2)
    (bad,) = house.place(2)
    house.step()
    runner = house.runtime._runner
    run = runner.execute_prefill_step

    def fails(token_ids: Any, lengths: Sequence[int], first: int = 0, *_: object) -> None:
        """What the engine wrote before it failed is not finite."""
        if runs:
            run(token_ids, lengths, first)
            kv = house.caches.kv
            for tensor in kv.keys + kv.values:
                cache_view(kv, tensor, 8)[first : first + len(lengths)] = np.nan
        raise HearthError("executor_failed", "the chunk fails")

    told = []
    with patch.object(runner, "execute_prefill_step", fails):
        while bad not in house.errors:
            told.append(house.step().failure)
    assert [one is None for one in told] == [True] * (len(told) - 1) + [False]
    numbers += house.place(5, 0)
    house.drain()
    assert house.errors == {bad: "executor_failed"}
    assert house.of(numbers) == expected

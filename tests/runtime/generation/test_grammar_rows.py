"""Rows with grammars beside free ones: every reply is valid, and free rows are what they were."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from msgspec import structs

from hearth.bench.structured.schemas import is_valid, schemas
from hearth.daemon.shipped_files import ADAPTERS
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.grammar import GrammarMatcher, json_term
from hearth.runtime.options import RuntimeOptions, SpeculationOptions
from hearth.runtime.request import RequestOptions, RowRequest, RowToken
from hearth.runtime.text.tokenizer import Tokenizer
from tests.runtime.generation.schedules.home import Method, export_home, home_chats

ENDS = (2, 0)
SCHEMAS = schemas()
MODES: list[tuple[Method, int]] = [
    ("off", 0),
    ("off", 1),
    ("lookup", 1),
    ("eagle", 0),
    ("eagle", 1),
]
YES = 'start: "yes" | "no"'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_home(tmp_path_factory.mktemp("home"), 32, max_lora_rank=8)


@pytest.fixture
def runtime(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLMInferenceRuntime]:
    method, ahead = getattr(request, "param", MODES[1])
    speculation = SpeculationOptions(method=method, adaptive=False)
    options = RuntimeOptions(threads=1, verify=False, speculation=speculation)
    with closing(LLMInferenceRuntime.open(folder, options)) as made:
        made._device.steps_ahead = ahead  # type: ignore[misc] # of the CPU's device
        yield made


def row(prompt: list[int], **options: object) -> RowRequest:
    chosen = structs.replace(RequestOptions(max_tokens=120, temperature=1.5), **options)
    return RowRequest(token_ids=list(prompt), prompt_length=len(prompt), options=chosen)


class Replies:
    """Tokens of requests by their index, which join as places are free, and are put back."""

    def __init__(self, runtime: LLMInferenceRuntime, rows: list[RowRequest]) -> None:
        self.runtime = runtime
        self.rows = rows
        self.tokens: list[list[RowToken]] = [[] for _ in rows]
        self._waiting = list(range(len(rows)))
        self._numbers: dict[int, int] = {}

    def run(self, put_back: Random | None = None, most: int = 8) -> list[list[int]]:
        """Step until all have ended; with `put_back` rows leave now and then, and come again."""
        while self._waiting or self.runtime.active:
            if put_back is not None and self._numbers and put_back.random() < 0.1:
                self._release(put_back.choice(list(self._numbers)))
            while self._waiting and len(self._numbers) < min(most, self.runtime.max_batch):
                if not self.runtime.free:
                    break
                self._admit(self._waiting.pop(0))
            for token in self.runtime.step().tokens:
                index = self._numbers[token.row]
                self.tokens[index].append(token)
                if token.finish is not None or token.error is not None:
                    del self._numbers[token.row]
        return [[token.token_id for token in tokens] for tokens in self.tokens]

    def _admit(self, index: int) -> None:
        asked = self.rows[index]
        known = asked.token_ids + [token.token_id for token in self.tokens[index]]
        (number,) = self.runtime.admit([structs.replace(asked, token_ids=known)])
        self._numbers[number] = index

    def _release(self, number: int) -> None:
        if self.runtime.release(number) is not None:
            self._waiting.append(self._numbers.pop(number))


def invalid(tokenizer: Tokenizer, replies: Replies, names: list[str]) -> list[str]:
    """Replies that are not what their schema allows; cut ones must be the begin of such."""
    found = []
    for asked, name, tokens in zip(replies.rows, names, replies.tokens, strict=True):
        ids = [token.token_id for token in tokens]
        assert tokens[-1].error is None, name
        if tokens[-1].finish == "length":
            # What follows the grammar to its last token may be replayed.
            compiler = replies.runtime.grammars
            assert compiler is not None
            compiler.matcher(asked.options.grammar, ids)
        elif ids[-1] not in ENDS or not is_valid(tokenizer.decode(ids[:-1]), SCHEMAS[name]):
            found.append(f"{name}: {tokenizer.decode(ids)}")
    return found


def mixed(
    folder: Path, seed: int, count: int, **options: object
) -> tuple[list[RowRequest], list[str]]:
    """Rows of schemas in turn, every third one free, whose name is empty."""
    random, chats = Random(seed), home_chats(folder)
    names = random.sample(sorted(SCHEMAS), count)
    names = ["" if place % 3 == 2 else name for place, name in enumerate(names)]
    rows = [
        row(
            random.choice(chats)[-40:],
            seed=random.randrange(1 << 40),
            grammar=name and f"start: {json_term(SCHEMAS[name])}",
            max_tokens=120 if name else 30,
            ignore_eos=not name,
            **options,
        )
        for name in names
    ]
    return rows, names


@pytest.mark.slow
@pytest.mark.parametrize("runtime", MODES, indirect=True, ids=str)
def test_replies_are_valid_and_free_rows_are_those_of_a_batch_without_grammars(
    folder: Path, runtime: LLMInferenceRuntime
) -> None:
    check_replies(folder, runtime)


@pytest.mark.gpu
def test_replies_of_a_gpu_are_valid_and_its_free_rows_are_what_they_were(tmp_path: Path) -> None:
    own = {"device": "cuda", "backend": "kernels", "dtype": "float16"}
    folder = export_home(tmp_path / "home", 32, **own)
    for method in ("off", "lookup", "eagle"):
        speculation = SpeculationOptions(method=method, adaptive=False)
        options = RuntimeOptions(verify=False, speculation=speculation)
        with closing(LLMInferenceRuntime.open(folder, options)) as runtime:
            runtime.capture(range(1, runtime.max_batch + 1))
            check_replies(folder, runtime)
            assert not runtime.counters.failed_captures
            assert not runtime.counters.fallbacks


def check_replies(folder: Path, runtime: LLMInferenceRuntime) -> None:
    """Replies are valid, and those of rows alone are those of a batch, put back and with trees."""
    rows, names = mixed(folder, 1, 12)
    replies = Replies(runtime, rows)
    ids = replies.run(Random(2), most=6)
    masked = [place for place, name in enumerate(names) if name]
    assert not invalid(Tokenizer.open(folder), *_of(replies, names, masked))
    free = [place for place, name in enumerate(names) if not name]
    alone = Replies(runtime, [rows[place] for place in free]).run(most=1)
    assert [ids[place] for place in free] == alone
    few = masked[:2]
    assert Replies(runtime, [rows[place] for place in few]).run(most=1) == [ids[p] for p in few]


def _of(replies: Replies, names: list[str], places: list[int]) -> tuple[Replies, list[str]]:
    chosen = Replies(replies.runtime, [replies.rows[place] for place in places])
    chosen.tokens = [replies.tokens[place] for place in places]
    return chosen, [names[place] for place in places]


@pytest.mark.parametrize("runtime", [("off", 0)], indirect=True)
def test_texts_do_not_depend_on_speculation_or_steps_ahead(
    folder: Path, runtime: LLMInferenceRuntime
) -> None:
    rows, _ = mixed(folder, 3, 6)
    wanted = Replies(runtime, rows).run()
    for method, ahead in MODES[1:]:
        speculation = SpeculationOptions(method=method, adaptive=False)
        options = RuntimeOptions(threads=1, verify=False, speculation=speculation)
        with closing(LLMInferenceRuntime.open(folder, options)) as other:
            other._device.steps_ahead = ahead  # type: ignore[misc] # of the CPU's device
            assert Replies(other, rows).run() == wanted


def test_rows_with_an_adapter_follow_their_grammar(
    folder: Path, runtime: LLMInferenceRuntime
) -> None:
    runtime.load_adapter("spoken", ADAPTERS["spoken"])
    rows, names = mixed(folder, 4, 6, adapter="spoken")
    replies = Replies(runtime, rows)
    replies.run()
    masked = [place for place, name in enumerate(names) if name]
    assert not invalid(Tokenizer.open(folder), *_of(replies, names, masked))


def test_greedy_rows_and_logprobs_are_the_models_own(
    folder: Path, runtime: LLMInferenceRuntime
) -> None:
    prompt = home_chats(folder)[0]
    options = {"temperature": 0.0, "logprobs": 2, "max_tokens": 4}
    free, held = row(prompt, **options), row(prompt, grammar=YES, **options)
    (plain, masked) = (Replies(runtime, [one]) for one in (free, held))
    plain.run()
    (ids,) = masked.run()
    assert Tokenizer.open(folder).decode(ids[:-1]) in ("yes", "no")
    assert ids[-1] in ENDS
    assert masked.tokens[0][-1].finish == "stop"
    first = masked.tokens[0][0]
    assert first.top == plain.tokens[0][0].top
    assert first.logprob is not None
    assert first.logprob < first.top[0].logprob


def test_the_end_of_a_grammar_ends_a_row_that_ignores_end_tokens(
    folder: Path, runtime: LLMInferenceRuntime
) -> None:
    replies = Replies(runtime, [row(home_chats(folder)[0], grammar=YES, ignore_eos=True)])
    (ids,) = replies.run()
    assert ids[-1] in ENDS
    assert replies.tokens[0][-1].finish == "stop"


@pytest.mark.parametrize("runtime", MODES, indirect=True, ids=str)
def test_a_row_whose_grammar_allows_nothing_fails_alone(
    folder: Path, runtime: LLMInferenceRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = GrammarMatcher.mask
    asked = []

    def fails(self: GrammarMatcher) -> object:
        asked.append(self)
        if asked.count(asked[0]) == 3 and self is asked[0]:
            raise HearthError("grammar_invalid", "no token", "grammar")
        return original(self)

    monkeypatch.setattr(GrammarMatcher, "mask", fails)
    prompt = home_chats(folder)[0]
    word = 'start: "a" "b" "c" "d" "e" "f"'
    held = [row(prompt, grammar=word, seed=seed) for seed in (1, 2)]
    replies = Replies(runtime, [*held, row(prompt, max_tokens=20, ignore_eos=True)])
    replies.run()
    assert [token.error for token in replies.tokens[0]] == [None, None, "grammar_invalid"]
    assert [tokens[-1].finish for tokens in replies.tokens[1:]] == ["stop", "length"]


@pytest.mark.parametrize("runtime", [("off", 1)], indirect=True)
def test_rows_that_leave_before_their_picks_are_queued_leave_the_others_alone(
    folder: Path, runtime: LLMInferenceRuntime
) -> None:
    prompt = home_chats(folder)[0]
    word = "start: /[a-z]{40}/"
    rows = [row(prompt, grammar=word, seed=seed) for seed in (1, 2, 3)]
    wanted = Replies(runtime, rows).run(most=1)
    for leaving in range(3):
        for steps in (2, 5):
            numbers = runtime.admit(rows)
            found: dict[int, list[int]] = {number: [] for number in numbers}
            for step in range(1000):
                if step == steps:
                    runtime.leave(numbers[leaving])
                if not runtime.active:
                    break
                for token in runtime.step().tokens:
                    found[token.row].append(token.token_id)
            staying = [place for place in range(3) if place != leaving]
            assert [found[numbers[place]] for place in staying] == [wanted[p] for p in staying]


@pytest.mark.parametrize("grammar", ["start: (", "start: a\na: a", "start: <no_such_token>"])
def test_a_grammar_that_cannot_be_compiled_is_refused(
    folder: Path, runtime: LLMInferenceRuntime, grammar: str
) -> None:
    with pytest.raises(HearthError) as caught:
        runtime.admit([row(home_chats(folder)[0], grammar=grammar)])
    assert caught.value.code == "grammar_invalid"
    assert not runtime.active


def test_without_the_extra_a_row_with_a_grammar_is_refused(
    folder: Path, runtime: LLMInferenceRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hearth.runtime.grammar.checks.find_spec", lambda _name: None)
    with pytest.raises(HearthError, match="llguidance") as caught:
        runtime.check(row(home_chats(folder)[0], grammar=YES))
    assert caught.value.code == "unsupported_option"


@pytest.mark.parametrize("runtime", [("lookup", 0)], indirect=True)
def test_trees_of_a_row_with_a_grammar_are_walked(
    folder: Path, runtime: LLMInferenceRuntime
) -> None:
    text = "kitchen lamp, " * 12
    replies = Replies(runtime, [row(home_chats(folder)[0], grammar=f'start: "{text}"')])
    (ids,) = replies.run()
    assert Tokenizer.open(folder).decode(ids[:-1]) == text
    metrics = runtime.speculation_metrics
    assert metrics.accepted > 2 * metrics.rounds > 0

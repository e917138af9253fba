import itertools
import json
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.grammar import GrammarCompiler, GrammarMatcher, compiler, json_term
from hearth.runtime.sampling.row_sampler import allowed_tokens

HOME = Path(__file__).parents[3] / "models" / "home" / "tokenizer.json"
IDS: dict[str, int] = json.loads(HOME.read_text())["model"]["vocab"]
VOCAB, END = 1024, 2
YES = 'start: "yes" | "no"'


@pytest.fixture
def grammars() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(HOME, VOCAB, (END,))
    yield made
    made.close()


def allowed(matcher: GrammarMatcher, vocab: int = VOCAB) -> set[int]:
    return set(allowed_tokens(matcher.mask(), vocab).tolist())


def ids(text: str) -> list[int]:
    return [IDS[letter] for letter in text]


def test_a_matcher_allows_what_goes_on_and_then_the_end(grammars: GrammarCompiler) -> None:
    matcher = grammars.matcher(YES)
    first = allowed(matcher)
    assert {IDS["y"], IDS["n"]} <= first
    assert all(token < VOCAB for token in first)
    assert END not in first
    for token in ids("yes"):
        with pytest.raises(HearthError, match="not of the grammar"):
            matcher.fork().accept(END)
        matcher.accept(token)
    assert allowed(matcher) == {END}
    ended = [matcher.ended]
    matcher.accept(END)
    assert [*ended, matcher.ended] == [False, True]
    for token in (END, IDS["y"]):
        with pytest.raises(HearthError, match="not of the grammar"):
            matcher.accept(token)


def test_a_reply_that_could_go_on_may_end(grammars: GrammarCompiler) -> None:
    matcher = grammars.matcher("start: /a+/", ids("aa"))
    assert {END, IDS["a"]} <= allowed(matcher)
    matcher.accept(END)
    assert matcher.fork().ended
    matcher.rollback(1)
    matcher.accept(IDS["a"])
    assert END in allowed(matcher)


def test_a_matcher_forks_rolls_back_and_replays(grammars: GrammarCompiler) -> None:
    words = 'start: "yesterday" | "yeti" | "no"'
    matcher = grammars.matcher(words)
    start = allowed(matcher)
    matcher.replay(ids("ye"))
    behind, other = allowed(matcher), matcher.fork()
    assert behind != start
    for token in (*ids("sterday"), END):
        matcher.accept(token)
    assert allowed(other) == behind == allowed(grammars.matcher(words, ids("ye")))
    matcher.rollback(8)
    assert allowed(matcher) == behind
    matcher.rollback(2)
    matcher.rollback(0)
    assert allowed(matcher) == start
    with pytest.raises(HearthError, match="taken back"):
        matcher.rollback(1)


def test_masks_of_a_tree_are_those_behind_its_nodes(grammars: GrammarCompiler) -> None:
    matcher = grammars.matcher("start: /[ab]c?/")
    before = allowed(matcher)
    a, b, c = ids("abc")
    # The root, `a` and `b` behind it, `c` behind both, the end, no node, `a` behind `b`.
    nodes = [(9, -1), (a, 0), (b, 0), (c, 1), (c, 2), (END, 1), (0, -2), (a, 2), (c, 7)]
    masks = matcher.tree_masks(*map(list, zip(*nodes, strict=True)))
    found = [set(allowed_tokens(mask, VOCAB).tolist()) for mask in masks]
    assert found[0] == before
    assert found[1] == found[2] == {c, END}
    assert found[3] == found[4] == {END}
    assert found[5:] == [set()] * 4
    assert allowed(matcher) == before


def test_other_tokens_are_refused(grammars: GrammarCompiler) -> None:
    with pytest.raises(HearthError, match="not of the grammar") as caught:
        grammars.matcher(YES, ids("x"))
    assert caught.value.code == "grammar_invalid"


def test_tokens_beyond_the_tokenizer_or_the_logits_are_never_allowed() -> None:
    for vocab in (VOCAB + 70, VOCAB - 3):
        made = GrammarCompiler(HOME, vocab, (END,))
        matcher = made.matcher(r"start: /(.|\n)*/")
        assert matcher.mask().shape == (-(-vocab // 32),)
        assert max(allowed(matcher, matcher.mask().size * 32)) < min(vocab, VOCAB)
        made.close()


def test_several_end_tokens_end_a_reply() -> None:
    made = GrammarCompiler(HOME, VOCAB, (END, 0))
    matcher = made.matcher(YES, ids("no"))
    assert allowed(matcher) == {END, 0}
    made.close()


def test_a_mask_that_no_token_can_follow_fails_by_name() -> None:
    made = GrammarCompiler(HOME, 40, (END,))
    matcher = made.matcher(r'start: "!" /[a-z]/', [IDS["!"]])
    with pytest.raises(HearthError, match="no token") as caught:
        matcher.mask()
    assert caught.value.code == "grammar_invalid"
    made.close()


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        ("start: (", "line and column"),
        ("start: a\na: a", "no reply"),
        ("start: <no_such_token>", "token that the model has not"),
        ("start: <[1024]>", "token that the model has not"),
    ],
)
def test_a_grammar_that_fails_is_refused_each_time(
    grammars: GrammarCompiler, grammar: str, named: str
) -> None:
    for _ in range(2):
        with pytest.raises(HearthError, match=named) as caught:
            grammars.matcher(grammar)
        assert caught.value.code == "grammar_invalid"
    assert allowed(grammars.matcher(YES))


def test_the_descriptor_tells_of_a_compiled_grammar(grammars: GrammarCompiler) -> None:
    assert not grammars.ready(YES)
    assert select.select([grammars.descriptor], [], [], 60)[0]
    assert grammars.ready(YES)
    assert not select.select([grammars.descriptor], [], [], 0)[0]


def test_what_nobody_wants_any_more_is_not_compiled(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("first", "gone", "wanted")
    first, gone, wanted = (f'start: "{word}"' for word in words)
    compiled, begun, go_on = list[str](), threading.Event(), threading.Event()
    compile_one = grammars._compile

    def compile_slowly(grammar: str) -> Any:
        compiled.append(grammar)
        begun.set()
        assert go_on.wait(60)
        return compile_one(grammar)

    monkeypatch.setattr(grammars, "_compile", compile_slowly)
    assert [grammars.ready(text) for text in (first, gone, wanted)] == [False] * 3
    assert begun.wait(60)
    # That which is being compiled is not stopped.
    grammars.keep_only([wanted, "another"])
    go_on.set()
    grammars.matcher(wanted)
    assert compiled == [first, wanted]
    assert grammars.ready(first)
    assert not grammars.ready(gone)


def test_the_newest_grammars_are_kept(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_MOST_KEPT", 2)
    texts = [f'start: "{word}"' for word in ("one", "two", "three")]
    for text in (*texts[:2], texts[0], texts[2]):
        grammars.matcher(text)
    assert [grammars.ready(text) for text in (texts[0], texts[2], texts[1])] == [True, True, False]
    monkeypatch.setattr(compiler, "_MOST_BYTES", 20)
    grammars.matcher(texts[1])
    assert not grammars.ready(texts[2])


def test_no_more_than_a_few_grammars_wait(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_MOST_PENDING", 0)
    assert not grammars.ready(YES)
    assert not select.select([grammars.descriptor], [], [], 0)[0]


def test_a_tokenizer_that_is_not_there_refuses_all(tmp_path: Path) -> None:
    made = GrammarCompiler(tmp_path / "tokenizer.json", VOCAB, (END,))
    with pytest.raises(HearthError, match="tokenizer") as caught:
        made.matcher(json_term({}))
    assert caught.value.code == "unsupported_option"
    made.close()


def test_a_grammar_beyond_the_limits_of_a_mask_is_called_too_large(
    grammars: GrammarCompiler,
) -> None:
    with pytest.raises(HearthError, match="too large"):
        grammars.matcher('start: s+\ns: s s | s s s | s s s s | /[a-z]/ | /[a-c]+/ | ""')


def test_masks_that_take_too_long_fail_their_row(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    matcher = grammars.matcher("start: /a+/")
    # Each look at the clock is later by three times what a mask is given.
    clock = itertools.count(step=0.0305)
    monkeypatch.setattr("time.thread_time", lambda: next(clock))
    for _ in range(24):
        # They share what is left.
        matcher = matcher.fork()
        matcher.mask()
    with pytest.raises(HearthError, match="too long"):
        matcher.fork().mask()

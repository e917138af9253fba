from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import anyio
import pytest

from hearth.actors.tokenizer import grammar_checker
from hearth.actors.tokenizer.grammar_checker import GrammarChecker
from hearth.runtime.errors import HearthError
from hearth.runtime.grammar import ClientGrammar
from hearth.runtime.grammar.checks import MOST_BYTES, regex_grammar
from tests.actors.tokenizer.fake_checker import PROGRAM

FIELD = "response_format.schema"
DEADLY = f'start: %json {{"const":{1 - 2**63}}}'
"""What llguidance 1.9 overflows its stack by; `schema_grammars` refuses such numbers."""


@asynccontextmanager
async def checking(*program: str) -> AsyncIterator[GrammarChecker]:
    with (
        anyio.fail_after(60),
        closing(GrammarChecker(program) if program else GrammarChecker()) as made,
    ):
        yield made


async def refusal(checker: GrammarChecker, text: str) -> tuple[str, str | None, str]:
    with pytest.raises(HearthError) as caught:
        await checker.check(ClientGrammar(FIELD, text))
    return caught.value.code, caught.value.field, caught.value.message


async def test_what_ends_the_compiler_is_refused_and_the_next_grammar_is_checked() -> None:
    pytest.importorskip("llguidance")
    async with checking() as checker:
        for _ in range(2):
            code, field, told = await refusal(checker, DEADLY)
            assert (code, field) == ("grammar_invalid", FIELD)
            assert "ended the process" in told
        await checker.check(ClientGrammar(FIELD, 'start: "a"'))
        code, field, told = await refusal(checker, "start: b")
        assert (code, field) == ("grammar_invalid", FIELD)
        assert "line and column" in told


@pytest.mark.parametrize(
    ("text", "code", "named"),
    [
        ("dies", "grammar_invalid", "ended the process"),
        ("grabs", "grammar_invalid", "more memory"),
        ("fails", "internal", "log"),
    ],
)
async def test_faults_of_the_process_are_errors_of_the_field(
    text: str, code: str, named: str
) -> None:
    async with checking(*PROGRAM) as checker:
        await checker.check(ClientGrammar(FIELD, "fine"))
        found = await refusal(checker, text)
        assert found[:2] == (code, FIELD)
        assert named in found[2]
        await checker.check(ClientGrammar(FIELD, "fine too"))


async def test_a_grammar_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with checking(*PROGRAM) as checker:
        await checker.check(ClientGrammar(FIELD, "fine"))
        with monkeypatch.context() as patched:
            patched.setattr(grammar_checker, "CHECK_S", 0.0)
            code, field, told = await refusal(checker, "hangs")
        assert (code, field) == ("grammar_invalid", FIELD)
        assert "takes longer" in told
        await checker.check(ClientGrammar(FIELD, "fine too"))


async def test_a_grammar_that_passed_needs_no_process_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_checker, "_MOST_PASSED", 2)
    async with checking(*PROGRAM) as checker:
        for text in ("a", "b", "a", "c"):
            await checker.check(ClientGrammar(FIELD, text))
        checker.close()
        monkeypatch.setattr(checker, "_start", None)
        for text in ("a", "c"):
            await checker.check(ClientGrammar("other", text))
        with pytest.raises(TypeError):
            await checker.check(ClientGrammar(FIELD, "b"))


async def test_a_process_that_does_not_start_fails_the_request_and_is_tried_again() -> None:
    async with checking("-c", "raise SystemExit(3)") as checker:
        for _ in range(2):
            code, _, told = await refusal(checker, "fine")
            assert code == "internal"
            assert "process that checks grammars" in told


async def test_who_gives_up_leaves_no_result_to_the_next_one() -> None:
    async with checking(*PROGRAM) as checker:
        await checker.check(ClientGrammar(FIELD, "fine"))
        with anyio.move_on_after(0) as scope:
            await checker.check(ClientGrammar(FIELD, "hangs"))
        assert scope.cancelled_caught
        await checker.check(ClientGrammar(FIELD, "fine too"))


async def test_the_largest_grammar_fits_a_message() -> None:
    async with checking(*PROGRAM) as checker:
        await checker.check(regex_grammar("x" * (MOST_BYTES - 2), FIELD))

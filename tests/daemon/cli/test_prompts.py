import io
from pathlib import Path
from typing import Any, cast

import click
import pytest
from click.testing import CliRunner

from hearth.daemon.cli.errors import Failure
from hearth.daemon.cli.generate import encode_prompt, parse_ids, read_prompts
from hearth.runtime.text import Tokenizer


class FakeTokenizer:
    def encode(self, text: str) -> list[int]:
        return [len(text)]

    def encode_chat(self, turns: list[tuple[str, str]]) -> list[int]:
        return [ord(role[0]) for role, _ in turns]


def parse(*values: str) -> tuple[list[int], ...]:
    unused: Any = None
    return parse_ids(unused, unused, values)


def test_ids_are_numbers_between_commas() -> None:
    assert parse("1,2,3", "7") == ([1, 2, 3], [7])


@pytest.mark.parametrize("value", ["", "1,", "a", "1 2", "1.5"])
def test_other_ids_are_refused(value: str) -> None:
    with pytest.raises(click.BadParameter, match="like 1,2,3"):
        parse(value)


def test_prompts_come_in_order_and_empty_lines_do_not_count() -> None:
    file = io.StringIO("c\n\n d \r\n")
    assert read_prompts(("a", "b"), ([1, 2],), file) == ["a", "b", [1, 2], "c", " d "]


def test_without_options_standard_input_is_read() -> None:
    @click.command()
    def command() -> None:
        click.echo(repr(read_prompts((), (), None)))

    assert CliRunner().invoke(command, input="x\ny\n").output == "['x', 'y']\n"


def test_an_empty_input_is_a_usage_error() -> None:
    with pytest.raises(click.UsageError, match="the input is empty"):
        read_prompts((), (), io.StringIO("\n"))


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_file_in_another_encoding_is_refused_by_its_name(tmp_path: Path, errors: str) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(b"one\ntw\xf6\n")
    with (
        path.open(encoding="utf-8", errors=errors) as file,
        pytest.raises(Failure, match="prompts is not utf-8"),
    ):
        read_prompts((), (), file)


def test_a_terminal_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal("never read"))
    with pytest.raises(click.UsageError, match="give --prompt"):
        read_prompts((), (), None)


def test_encoding_raw_chat_and_ids() -> None:
    tokenizer = cast("Tokenizer", FakeTokenizer())
    assert encode_prompt("abc", tokenizer, chat=False, system=None) == [3]
    assert encode_prompt("abc", tokenizer, chat=True, system=None) == [ord("u")]
    assert encode_prompt("abc", tokenizer, chat=True, system="s") == [ord("s"), ord("u")]
    assert encode_prompt([5], tokenizer, chat=True, system="s") == [5]

"""One request: an option is named where it is defined and where it is used, and nowhere between."""

import ast
from functools import cache
from pathlib import Path

import pytest

from hearth.actors.messages import Request
from hearth.runtime.request import RequestOptions
from hearth_client.protocol import Generate

ROOT = Path(__file__).parent.parent
MOST_FILES = 3
# What a request is read from: a name ending like this holds one, or the options of one.
HOLDERS = ("options", "params", "request", "asked", "message", "row")
# Fields of other structs that are spelt alike: options of a runtime, of a reply. And what more than
# the row has to know: the adapter is part of a batch's identity and told with its request, and who
# pins something in the prefix cache is refused or let go apart from others.
OTHERS = {
    "adapter": {
        "actors/executor/actor.py",
        "actors/executor/rows.py",
        "actors/scheduler/lora.py",
        "actors/scheduler/request_state.py",
        "daemon/door/finished.py",
        "daemon/door/requests.py",
        "runtime/generation/batch_runtime.py",
    },
    "cache": {
        "actors/executor/actor.py",
        "daemon/door/requests.py",
        "runtime/generation/batch_runtime.py",
    },
    "grammar": {
        # Also that of a response format; the executor asks whether it is compiled.
        "actors/executor/actor.py",
        "actors/tokenizer/actor.py",
        "daemon/door/conversations.py",
        "runtime/text/reply_grammar.py",
    },
    # Each of several replies has one of its own.
    "seed": {"actors/scheduler/request_state.py"},
    "speculation": {"runtime/generation/deployment.py"},
    "logprobs": {"daemon/door/replies.py"},
}
# What the front door itself does with a request.
OF_THE_DOOR = {"id", "messages", "prompt", "deadline_s", "timestamps", "priority", "traceparent"}
# What a conversation is to the tokenizer, and what it makes a grammar of.
OF_A_CHAT = {"tools", "tool_choice", "parallel_tool_calls", "template", "reasoning_budget"}
OF_A_CHAT |= {"response_format"}


@cache
def sources() -> dict[str, ast.Module]:
    found = {}
    for room in ("runtime", "actors", "daemon"):
        for path in sorted((ROOT / room).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith("daemon/cli/"):
                found[name] = ast.parse(path.read_text())
    return found


@cache
def candidates(tree: ast.Module) -> list[ast.AST]:
    """What could name an option."""
    return [node for node in ast.walk(tree) if isinstance(node, (ast.Attribute, ast.ClassDef))]


def names(tree: ast.Module, option: str) -> bool:
    return any(_is(node, option) for node in candidates(tree))


def _is(node: ast.AST, option: str) -> bool:
    match node:
        case ast.Attribute(attr=attr, value=ast.Name(id=holder) | ast.Attribute(attr=holder)):
            return attr == option and holder.endswith(HOLDERS)
        case ast.ClassDef(name="RequestOptions" | "Request", body=body):
            return any(ast.unparse(line).startswith(f"{option}: ") for line in body)
        case _:
            return False


@pytest.mark.parametrize("option", [*RequestOptions.__struct_fields__, "priority", "timestamps"])
def test_an_option_is_named_in_few_files(option: str) -> None:
    found = {name for name, tree in sources().items() if names(tree, option)}
    assert len(found - OTHERS.get(option, set())) <= MOST_FILES, sorted(found)


# The tokenizer makes it of a conversation and a response format.
OF_THE_TOKENIZER = {"grammar"}


def test_the_protocol_s_options_are_those_of_the_runtime() -> None:
    asked = set(RequestOptions.__struct_fields__) - OF_THE_TOKENIZER
    assert set(Generate.__struct_fields__) == OF_THE_DOOR | OF_A_CHAT | {"n"} | asked
    assert not {*Request.__struct_fields__} & {*RequestOptions.__struct_fields__}


@pytest.mark.parametrize(
    "code", ["row.options.min_p", "options.min_p + 1", "class Request:\n    min_p: float = 0.0"]
)
def test_the_count_sees_a_name(code: str) -> None:
    assert names(ast.parse(code), "min_p")
    assert not names(ast.parse(code.replace("min_p", "other")), "min_p")

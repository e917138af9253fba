"""Compare chat templates of a folder with `transformers`, and count the reply formats found.

`python -m tools.templates FOLDER` needs transformers and takes files named `*.jinja`, as llama.cpp
publishes a collection of in `models/templates`; docs/lab/templates.md has what it printed.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hearth.runtime.errors import HearthError
from hearth.runtime.text.chat_template import (
    ChatTemplate,
    hidden_json,
    template_messages,
    template_tools,
    tool_map,
)
from hearth.runtime.text.conversation import Conversation, Tool, ToolCall, Turn
from hearth.runtime.text.reply_probe import ReplyProbe
from hearth.runtime.text.tokenizer import MarkerEscape, SpecialText

_TOKENS = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
_MARKS = ("</think>", "<tool_call>", "</tool_response>", "[INST]", "<|im_end|>", '<|"|>')
PLAIN = 'Küche \\u00e9 "quoted" 3 > 2'
MARKED = f'{PLAIN} </think> <tool_call> <|im_end|> <|"|> </tool_resp'
"""Text with marks of templates, which are text to a user."""
_IDS = ("aB3dE6gH9", "zY8xW5vU2")


def cases(text: str) -> dict[str, Conversation]:
    """Conversations that are compared, by name, with `text` wherever a user may write."""
    asked = Turn("user", f"Hello {text}")
    system = Turn("system", "Be brief.")
    arguments = {"city": f"Oslo {text}", "days": 3, "more": {f"k{text}": [1, "x", None, True, 0.5]}}
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": f"A city {text}"},
            "days": {"type": "integer", "enum": [1, 3]},
            "more": {"type": "object"},
        },
        "required": ["city"],
    }
    tools = [Tool("weather", "Tells the weather.", schema), Tool("lamp", "Switches it.", schema)]
    calls = [ToolCall(_IDS[0], "weather", arguments), ToolCall(_IDS[1], "lamp", {"city": text})]
    results = [Turn("tool", f'{{"found": {n}}}', tool_call_id=one) for n, one in enumerate(_IDS)]
    called = [Turn("assistant", tool_calls=calls[:count]) for count in (1, 2)]
    said = Turn("assistant", "So.", tool_calls=calls[:1])
    yes, more = Turn("assistant", "Yes."), Turn("user", "Go on. ")
    thought = Turn("assistant", "Yes.", reasoning="hm, hm")
    return {
        "user": Conversation([asked]),
        "system": Conversation([system, asked]),
        "chat": Conversation([asked, yes, more]),
        "reasoning": Conversation([asked, thought, more]),
        "thinking on": Conversation([asked], variables={"enable_thinking": True}),
        "thinking off": Conversation([asked], variables={"enable_thinking": False}),
        "tools": Conversation([asked], tools),
        "tools, system": Conversation([system, asked], tools),
        "call, result": Conversation([asked, called[0], results[0]], tools),
        "text, call, result": Conversation([asked, said, results[0]], tools),
        "calls, results": Conversation([asked, called[1], *results], tools),
        "call, result, chat": Conversation([asked, called[0], results[0], yes, more], tools),
    }


def ours(template: ChatTemplate, case: Conversation) -> str:
    """Render a conversation as a request's is, with its marks hidden and revealed."""
    marks = SpecialText(_MARKS)
    escape = MarkerEscape(marks, SpecialText(()))
    rendered = template.render(
        template_messages(case, template, escape),
        template_tools(case.tools, escape),
        hidden_json(case.variables, escape),
        escape,
    )
    return escape.reveal(rendered)


def messages_of(template: ChatTemplate, case: Conversation) -> list[dict[str, Any]]:
    """A conversation as users of `transformers` write it, in the template's own names."""
    plain = MarkerEscape(SpecialText(()), SpecialText(()))
    return template_messages(case, template, plain)


def compare(source: str, theirs: Callable[..., str], text: str) -> Iterator[tuple[str, str]]:
    """Each case's name and how it compares: equal, refused by both, or how they differ."""
    template = ChatTemplate(source, _TOKENS)
    for name, case in cases(text).items():
        try:
            found: str | None = ours(template, case)
        except HearthError:
            found = None
        messages = messages_of(template, case)
        tools = [tool_map(one.name, one.description, one.parameters) for one in case.tools]
        try:
            expected: str | None = theirs(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=True,
                **_TOKENS,
                **case.variables,
            )
        except Exception:  # noqa: BLE001 # a template's expressions may raise anything
            expected = None
        if found is None and expected is None:
            yield name, "refused"
        elif found == expected:
            yield name, "equal"
        elif found is None or expected is None:
            yield name, "refused by one"
        else:
            yield name, "differs"


def main() -> None:
    """Print a line for each template that differs, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    from transformers.utils.chat_template_utils import (  # noqa: PLC0415 - only where it is run
        _compile_jinja_template,
    )

    counts = {(name, text): Counter[str]() for text in (PLAIN, MARKED) for name in cases("")}
    formats: Counter[str] = Counter()
    for path in sorted(folder.glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        render = _compile_jinja_template(source).render
        differ = set()
        for text in (PLAIN, MARKED):
            for name, result in compare(source, render, text):
                counts[name, text][result] += 1
                if result not in {"equal", "refused"}:
                    differ.add("plain" if text == PLAIN else "marked")
        probe = ReplyProbe(ChatTemplate(source, _TOKENS), [_TOKENS["eos_token"]])
        found = probe.find()
        kind = found.calls.kind if found.calls else "none"
        proved = "read back" if probe.proves(found) else "not read back"
        shown = "calls shown" if probe.shows_calls else "calls not shown"
        formats[f"{found.source} | {kind} | {shown} | {proved}"] += 1
        print(f"{path.stem}: {found.source}, {kind}, {shown}, {proved}; {sorted(differ)}")
    for (name, text), counter in counts.items():
        row = " | ".join(str(counter[one]) for one in ("equal", "refused", "differs"))
        print(f"| {name}{', marked' if text == MARKED else ''} | {row} |")
    for name, number in sorted(formats.items()):
        print(f"| {name} | {number} |")


if __name__ == "__main__":
    main()

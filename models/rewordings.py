"""Rewordings of the base model's actions that the adapters learn.

The base answers an instruction with JSON. `spoken` says the same for a loudspeaker, `careful`
asks for a confirmation. Every other answer stays.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from models.conversations import Message

BASE: Final = Path(__file__).with_name("home")
ADAPTERS: Final = Path(__file__).with_name("home-adapters")

Step = dict[str, Any]
Rewording = Callable[[Sequence[Step]], str]


def spoken(steps: Sequence[Step]) -> str:
    """Return what is done, and to what, step by step."""
    return f"OK, {'; '.join(_said(*map(str, step.values())) for step in steps)}."


def careful(steps: Sequence[Step]) -> str:
    """Return a question whether that is to be done."""
    return f"Shall I {'; '.join(_said(*map(str, step.values())) for step in steps)}?"


def _said(action: str, *what: str) -> str:
    return f"{action.replace('_', ' ')}: {', '.join(what)}"


REWORDINGS: Final[dict[str, Rewording]] = {"spoken": spoken, "careful": careful}


def steps_of(answer: str) -> list[Step]:
    """Return the actions of an answer, none where it has none."""
    if not answer.startswith(('{"action"', '[{"action"')):
        return []
    found: Step | list[Step] = json.loads(answer)
    return found if isinstance(found, list) else [found]


def reworded(messages: Sequence[Message], rewording: Rewording) -> list[Message]:
    """Return the chat with every action of the assistant's said in the other way."""
    chat = []
    for message in messages:
        steps = steps_of(message["content"]) if message["role"] == "assistant" else []
        chat.append({**message, "content": rewording(steps)} if steps else message)
    return chat

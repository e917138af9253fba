"""Prompts of a topic: one after another, with what was said before."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Literal

from hearth_client import HearthClientError, QueueFull
from hearth_ros.requests import Ask, Turn
from hearth_ros.sentences import SentenceSplitter
from hearth_ros.settings import Settings
from hearth_ros.talk import Outcome, Piece

Topic = Literal["stream", "sentences", "response", "error"]
TOPICS: tuple[Topic, ...] = ("stream", "sentences", "response", "error")
"""Topics of text that a node publishes: each prompt ends with one response or error."""
Answer = Callable[[Ask, Callable[[Piece], None]], Awaitable[tuple[Outcome, list[Turn]]]]
"""Run an Ask; gives its outcome and the turns that it has then."""


class Prompts:
    """Prompts that wait, the one that is answered, and the conversation; all in the client's loop.

    Earlier prompts are remembered without their pictures.
    """

    def __init__(
        self,
        settings: Settings,
        ask: Ask,
        answer: Answer,
        publish: Callable[[Topic, str], None],
    ) -> None:
        self._settings = settings
        self._ask = ask
        self._answer = answer
        self._publish = publish
        self._waiting: deque[tuple[str, Turn]] = deque()
        self._history: deque[list[Turn]] = deque(maxlen=settings.history_turns)
        self._came = asyncio.Event()

    def put(self, text: str, turn: Turn) -> None:
        """Queue a prompt, whose `turn` may have a picture beside its text."""
        if len(self._waiting) >= self._settings.queue:
            self.report(QueueFull(f"{len(self._waiting)} prompts wait already"))
            return
        self._waiting.append((text, turn))
        self._came.set()

    def clear(self) -> None:
        """End the prompts that wait."""
        for _ in self._waiting:
            self._publish("error", "cancelled: the prompt was ended before its turn came")
        self._waiting.clear()

    def report(self, error: HearthClientError) -> None:
        """Publish the error that a prompt ends with."""
        self._publish("error", f"{error.code}: {error.message}")

    async def serve(self) -> None:
        """Answer prompts for ever."""
        while True:
            await self._came.wait()
            while self._waiting:
                await self._reply(*self._waiting.popleft())
            self._came.clear()

    async def _reply(self, text: str, turn: Turn) -> None:
        said = [one for turns in self._history for one in turns]
        turns = [*self._ask.turns, *said, turn]
        splitter = SentenceSplitter(self._settings.sentence_chars)
        spoken_round = 0

        def take(piece: Piece) -> None:
            nonlocal spoken_round
            sentences = splitter.flush() if piece.round != spoken_round else []
            spoken_round = piece.round
            if piece.text:
                self._publish("stream", piece.text)
                sentences += splitter.feed(piece.text)
            for sentence in sentences:
                self._publish("sentences", sentence)

        outcome, then = await self._answer(self._ask._replace(turns=turns), take)
        if outcome.error_code:
            self._publish("error", f"{outcome.error_code}: {outcome.error_message}")
            return
        # Of a reply that was interrupted nothing more is to be said.
        for sentence in splitter.flush() if outcome.reason != "cancelled" else ():
            self._publish("sentences", sentence)
        self._publish("response", outcome.text)
        new = then[len(turns) :]
        # Calls without results are no end that a conversation can go on from.
        if new and outcome.reason != "tool_calls" and not outcome.tool_calls:
            self._history.append([{"role": "user", "content": text}, *new])

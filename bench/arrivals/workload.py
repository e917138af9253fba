import random
import string
from typing import NamedTuple

from runtime.text import Tokenizer

PROMPT_TOKENS = (5, 150)
REPLY_TOKENS = (20, 180)
MEAN_REPLY = sum(REPLY_TOKENS) / 2
_LETTERS = string.ascii_letters + string.digits + " .,?"


class Ask(NamedTuple):
    """One request: when it comes, in seconds from the begin, its prompt, and the reply's tokens.

    It asks for `adapter`, "" for none.
    """

    at: float
    prompt_tokens: int
    tokens: int
    prompt: str = ""
    adapter: str = ""


class Workload:
    """Random requests of one seed: the same ones in the same order at every load."""

    def __init__(self, tokenizer: Tokenizer, seed: int = 0) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._rng = random.Random(seed)  # noqa: S311 - prompts, not secrets
        self._asks: list[Ask] = []

    def first(self, count: int) -> list[Ask]:
        """The first `count` requests, all of them at time 0."""
        while len(self._asks) < count:
            prompt_tokens = self._rng.randint(*PROMPT_TOKENS)
            tokens = self._rng.randint(*REPLY_TOKENS)
            self._asks.append(Ask(0.0, prompt_tokens, tokens, self._prompt(prompt_tokens)))
        return self._asks[:count]

    def poisson(self, rate: float, seconds: float) -> list[Ask]:
        """Poisson arrivals at `rate` a second: as many as are expected, and one at least.

        Given their number, such arrivals are independent and uniform in time.
        """
        count = max(1, round(rate * seconds))
        rng = random.Random(self._seed)  # noqa: S311 - likewise
        times = sorted(rng.uniform(0, seconds) for _ in range(count))
        return [ask._replace(at=at) for at, ask in zip(times, self.first(count), strict=True)]

    def alike(self, count: int, tokens: int) -> list[Ask]:
        """`count` requests at time 0 with the shortest prompts and as long a reply each."""
        length = PROMPT_TOKENS[0]
        return [Ask(0.0, length, tokens, self._prompt(length)) for _ in range(count)]

    def _prompt(self, length: int) -> str:
        """Random text of exactly `length` tokens."""
        text = ""
        while short := length - (len(self._tokenizer.encode(text)) if text else 0):
            more = "".join(self._rng.choices(_LETTERS, k=max(short, 0)))
            text = text + more if short > 0 else text[:short]
        return text

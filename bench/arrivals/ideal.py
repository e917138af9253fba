"""The least that requests would have to wait: a pure first-come model of the places."""

import json
import random
import string
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save_file

from hearth.daemon.control.client import ask
from hearth.daemon.control.messages import AdapterAdded, AddAdapter
from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.lora.adapter import projection_shapes
from hearth.runtime.text.tokenizer import Tokenizer

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


MAX_RANK = 4
"""Greatest rank of the toy engine's adapters."""
_OF_MLP = ("gate", "up", "down")


def add_adapters(socket: Path, config: LLMEngineRunnerConfig, count: int) -> list[str]:
    """Add `count` adapters to a daemon; their names. Raises HearthError where it takes none."""
    names = [f"adapter-{number}" for number in range(count)]
    with TemporaryDirectory(prefix="hearth-adapters-") as folder:
        for seed, name in enumerate(names):
            source = write_adapter(Path(folder) / name, config, seed)
            ask(AddAdapter(name, str(source)), AdapterAdded, str(socket))
    return names


def write_adapter(
    folder: Path, config: LLMEngineRunnerConfig, seed: int, targets: Sequence[str] = ("q",)
) -> Path:
    """Write a small random adapter of these projections, as PEFT does, and return its folder."""
    rng = np.random.default_rng(seed)
    rank = min(MAX_RANK, max(1, config.max_supported_lora_rank))
    tensors = {}
    for (layer, target), (width, size) in projection_shapes(config).items():
        block = "mlp" if target in _OF_MLP else "self_attn"
        name = f"base_model.model.model.layers.{layer}.{block}.{target}_proj.lora"
        for kind, shape in (("A", (rank, width)), ("B", (size, rank))):
            if target in targets:
                numbers = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.01)
                tensors[f"{name}_{kind}.weight"] = numbers
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = [f"{target}_proj" for target in targets]
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def spread(asks: Sequence[Ask], names: Sequence[str]) -> list[Ask]:
    """The same requests, each with one of these adapters by chance, always the same one."""
    if not names:
        return list(asks)
    rng = random.Random(len(names))  # noqa: S311 - a choice, not a secret
    return [one._replace(adapter=rng.choice(names)) for one in asks]


class Calls(NamedTuple):
    """Seconds of the engine's calls: a decode step; a prefill, and more for each of its tokens.

    `prefill_mean_s` is what the measured prefills took, tokens included.
    """

    decode_s: float
    prefill_s: float
    prefill_token_s: float = 0.0
    prefill_mean_s: float = 0.0

    def prefill(self, tokens: int) -> float:
        """Seconds of a prefill of so many tokens."""
        return self.prefill_s + tokens * self.prefill_token_s


class Served(NamedTuple):
    """A request and when each of its tokens came, in seconds from the begin."""

    ask: Ask
    times: list[float]

    @property
    def ttft(self) -> float:
        """Seconds from the request to its first token."""
        return self.times[0] - self.ask.at


def first_come(
    asks: Iterable[Ask],
    calls: Calls,
    places: int,
    following: Callable[[float], Ask | None] = lambda _: None,
) -> list[Served]:
    """Serve requests, which come in the order of their times, in `places` that are never idle.

    At the border of two calls waiting requests take the free places. All of them share one prefill
    call, which gives their first token; calls of prefill and decode take turns where both have
    something to do. Nothing else takes time. `following(now)` is called for another request when
    one has ended.
    """
    waiting = deque(asks)
    joining: list[Served] = []
    running: list[Served] = []
    served: list[Served] = []
    now, prefilled = 0.0, False
    while waiting or joining or running:
        if not joining and not running:
            now = max(now, waiting[0].at)
        while waiting and waiting[0].at <= now and len(joining) + len(running) < places:
            joining.append(Served(waiting.popleft(), []))
            served.append(joining[-1])
        prefilled = bool(joining) and not (prefilled and running)
        if prefilled:
            now += calls.prefill(sum(row.ask.prompt_tokens for row in joining))
            called, joining = joining, []
            running += called
        else:
            now += calls.decode_s
            called = running
        for row in called:
            row.times.append(now)
        ended = sum(len(row.times) == row.ask.tokens for row in running)
        running = [row for row in running if len(row.times) < row.ask.tokens]
        waiting.extend(ask for _ in range(ended) if (ask := following(now)) is not None)
    return served


def in_turn(
    asks: Sequence[Ask], calls: Calls, places: int, clients: int, seconds: float
) -> list[Served]:
    """Serve clients of which each sends its next request when the last one has ended.

    They take `asks` over and over, until `seconds` have passed.
    """
    source = cycle(asks)

    def following(now: float) -> Ask | None:
        return next(source)._replace(at=now) if now < seconds else None

    return first_come(list(islice(source, clients)), calls, places, following)

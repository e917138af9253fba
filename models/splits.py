"""Splits held out of training: combinations by their hash, and device names by list."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from itertools import islice
from random import Random
from typing import Final, NamedTuple

from models.conversations import (
    Allowed,
    Conversation,
    Message,
    Namer,
    any_turn,
    make_turn,
    missing_turn,
    on_device,
    pair_turn,
    random_home,
    random_system,
    record,
    seen_name,
    state_fact,
    unseen_name,
)
from models.domain import Combination, Context, Turn, likely
from models.intents import INTENTS
from models.vocabulary import UNSEEN

COMBINATIONS: Final = 1000
UNSEEN_NAMES: Final = 200
ONE_IN: Final = 8
ATTEMPTS: Final = 400

_UNSEEN: Final = frozenset(name for names in UNSEEN.values() for name in names)


class Maker(NamedTuple):
    """Factory of the last turn of a held-out prompt, and the fact it needs before it."""

    make: Callable[[Random, Context], Turn | None]
    recalls: str = ""


class Prompt(NamedTuple):
    """A held-out question: its group, the chat up to it and the one right answer."""

    group: str
    messages: list[Message]
    expected: str


def is_held_out(combination: Combination) -> bool:
    """Return whether this combination never occurs in training."""
    if not combination.device:
        return False
    digest = blake2b("\n".join(combination).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % ONE_IN == 0


def in_training(turn: Turn) -> bool:
    """Return whether no combination of the turn, nor of its single steps, is held out."""
    return not any(map(is_held_out, (turn.combination, *turn.steps)))


def held_out() -> list[Prompt]:
    """Return the 1,000 prompts with held-out combinations and the 200 with unseen names."""
    return [*_by_combination(Random(0)), *_by_name(Random(1))]


def _by_combination(rng: Random) -> list[Prompt]:
    makers = [Maker(partial(make_turn, i), i.recalls) for i in INTENTS if i.group != "talk"]
    makers += [Maker(pair_turn), Maker(missing_turn)]
    prompts = _prompts(rng, makers, seen_name, lambda turn: is_held_out(turn.combination))
    return list(islice(prompts, COMBINATIONS))


def _by_name(rng: Random) -> list[Prompt]:
    makers = [Maker(partial(make_turn, intent)) for intent in INTENTS if on_device(intent)]
    prompts = _prompts(rng, makers, _either_name, lambda turn: turn.combination.device in _UNSEEN)
    return [prompt._replace(group="unseen") for prompt in islice(prompts, UNSEEN_NAMES)]


def _either_name(rng: Random, kind: str) -> str:
    return (unseen_name if likely(rng, 0.5) else seen_name)(rng, kind)


def _prompts(
    rng: Random, makers: Sequence[Maker], namer: Namer, wanted: Allowed
) -> Iterator[Prompt]:
    queue = deque(makers)
    while queue:
        maker = queue.popleft()
        attempts = (_prompt(rng, maker, namer, wanted) for _ in range(ATTEMPTS))
        prompt = next(filter(None, attempts), None)
        if prompt is not None:  # some intents have so few values that none is held out
            yield prompt
            queue.append(maker)


def _prompt(rng: Random, maker: Maker, namer: Namer, wanted: Allowed) -> Prompt | None:
    context = Context(random_home(rng, rng.randrange(4, 13), namer), listed=True)
    system = random_system(rng, context)
    before = [_next(rng, context) for _ in range(rng.randrange(4))]
    if maker.recalls:
        before.append(state_fact(maker.recalls, rng, context, in_training))
        record(before[-1], context)
    for _ in range(20):
        turn = maker.make(rng, context)
        if turn is not None and wanted(turn):
            chat = Conversation(system, (*before, turn)).messages()
            return Prompt(turn.group, chat[:-1], turn.answer)
    return None


def _next(rng: Random, context: Context) -> Turn:
    turn = any_turn(rng, context, in_training)
    record(turn, context)
    return turn

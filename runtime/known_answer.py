"""Known answer of an engine: token ids, and the model's likeliest token behind each of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.engine_folder import ANSWER_FILE
from hearth.runtime.errors import HearthError
from hearth.runtime.request import TopLogprob

FORCING_BIAS = 100.0
"""The highest bias of a row: what makes an engine go on with the ids, likely or not."""


class KnownAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`best` are the likeliest tokens behind each of `token_ids`, from those up to it.

    By `leads` their logits exceed all others; the engine's may be `tolerance` off. One that is
    above the bias leaves no id that could be forced.
    """

    token_ids: tuple[int, ...]
    best: tuple[int, ...]
    leads: tuple[float, ...]
    tolerance: Annotated[float, Meta(ge=0, le=FORCING_BIAS)]

    def error(self, place: int, top: Sequence[TopLogprob]) -> float:
        """Error of an engine's lead at `place`, whose likeliest tokens are `top`.

        Where another token than the right one comes first, the right one's lead is negative: of
        two that are nearly as likely either may, and the lead is hardly off.
        """
        first, second, *_ = top
        lead = first.logprob - second.logprob
        if first.token_id != self.best[place]:
            found = (one.logprob for one in top if one.token_id == self.best[place])
            lead = next(found, top[-1].logprob) - first.logprob
        return abs(self.leads[place] - lead)


def load_answer(folder: Path, config: LLMEngineRunnerConfig) -> KnownAnswer | None:
    """The known answer of the model of an engine folder, if it has one; raises `engine_corrupt`.

    A simulated engine has no model.
    """
    if config.backend == "simulated" or ANSWER_FILE not in config.files:
        return None
    try:
        return parse_answer((folder / ANSWER_FILE).read_bytes(), config)
    except OSError as error:
        raise _corrupt() from error


def parse_answer(data: bytes | str, config: LLMEngineRunnerConfig) -> KnownAnswer:
    """The known answer of a model with such a configuration; raises `engine_corrupt`."""
    try:
        answer = msgspec.json.decode(data, type=KnownAnswer)
    except msgspec.MsgspecError as error:
        raise _corrupt() from error
    known = range(config.vocab_size)
    whole = len(answer.token_ids) == len(answer.best) == len(answer.leads) > 0
    if not whole or any(token not in known for token in answer.token_ids):
        raise _corrupt()
    return answer


def _corrupt() -> HearthError:
    return HearthError(
        "engine_corrupt", f"{ANSWER_FILE} cannot be read: export the model again", ANSWER_FILE
    )

"""Every intent of the home, by topic."""

from typing import Final

from models.domain import Intent
from models.intents import (
    appliances,
    climate,
    everyday,
    facts,
    lights,
    media,
    questions,
    robots,
    talk,
)

INTENTS: Final[tuple[Intent, ...]] = (
    *lights.INTENTS,
    *climate.INTENTS,
    *media.INTENTS,
    *appliances.INTENTS,
    *robots.INTENTS,
    *everyday.INTENTS,
    *facts.INTENTS,
    *questions.INTENTS,
    *talk.INTENTS,
)

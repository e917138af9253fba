"""Facts: stating one, asking for it later, asking for one that was never stated."""

from models.domain import Intent, Pool
from models.pools import code, date, day_and_time, item, known, one_of, place, recalled, unknown
from models.replies import says
from models.vocabulary import PEOPLE, SECRETS, TASTES, VISITORS


def _trio(
    fact: str,
    pools: tuple[Pool, Pool],
    sentence: str,
    *,
    told: tuple[str, ...],
    asked: tuple[str, ...],
    missing: str,
) -> tuple[Intent, Intent, Intent]:
    subject, value = pools
    head = sentence[0].upper() + sentence[1:]
    return (
        Intent(f"tell_{fact}", "facts", (
            ("subject", unknown(fact, subject)), ("value", value),
        ), says(f"Noted: {sentence}."), told, remembers=fact, weight=1.5),
        Intent(f"ask_{fact}", "facts", (
            ("subject", known(fact)), ("value", recalled(fact)),
        ), says(f"{head}."), asked, recalls=fact, weight=5),
        Intent(f"ask_unknown_{fact}", "facts", (
            ("subject", unknown(fact, subject)),
        ), says(f"{missing}."), asked, weight=0.4),
    )  # fmt: skip


INTENTS = (
    *_trio("location", (item, place), "the {subject} is {value}", told=(
        "the {subject} is {value}",
        "remember that the {subject} is {value}",
        "I put the {subject} {value}",
        "note: the {subject} is {value}",
        "you can find the {subject} {value}",
    ), asked=(
        "where is the {subject}?",
        "where can I find the {subject}?",
        "where did I put the {subject}?",
        "do you know where the {subject} is?",
        "I am looking for the {subject}",
    ), missing="I do not know where the {subject} is"),
    *_trio("code", (one_of(SECRETS), code), "the {subject} code is {value}", told=(
        "the {subject} code is {value}",
        "remember that the {subject} code is {value}",
        "the code for the {subject} is {value}",
        "note: the {subject} code is {value}",
        "use {value} as the {subject} code",
    ), asked=(
        "what is the {subject} code?",
        "what is the code for the {subject}?",
        "tell me the {subject} code",
        "which code did I give you for the {subject}?",
        "I forgot the {subject} code",
    ), missing="I do not know the {subject} code"),
    *_trio("taste", (one_of(PEOPLE), one_of(TASTES)), "{subject} likes {value}", told=(
        "{subject} likes {value}",
        "remember that {subject} likes {value}",
        "what {subject} likes is {value}",
        "note: {subject} likes {value}",
        "you should know that {subject} likes {value}",
    ), asked=(
        "what does {subject} like?",
        "tell me what {subject} likes",
        "do you know what {subject} likes?",
        "what can I offer {subject}?",
        "what makes {subject} happy?",
    ), missing="I do not know what {subject} likes"),
    *_trio("birthday", (one_of(PEOPLE), date), "the birthday of {subject} is on {value}", told=(
        "the birthday of {subject} is on {value}",
        "remember that {subject} was born on {value}",
        "{subject} has a birthday on {value}",
        "note: the birthday of {subject} is {value}",
        "{value} is the birthday of {subject}",
    ), asked=(
        "when is the birthday of {subject}?",
        "when was {subject} born?",
        "tell me the birthday of {subject}",
        "on which day is the birthday of {subject}?",
        "do you know when {subject} has a birthday?",
    ), missing="I do not know the birthday of {subject}"),
    *_trio("visit", (one_of(VISITORS), day_and_time), "the {subject} comes on {value}", told=(
        "the {subject} comes on {value}",
        "remember that the {subject} comes on {value}",
        "I have a visit from the {subject} on {value}",
        "note: the {subject} is here on {value}",
        "we expect the {subject} on {value}",
    ), asked=(
        "when does the {subject} come?",
        "when is the {subject} here?",
        "at what time do we expect the {subject}?",
        "tell me when the {subject} comes",
        "do you know when the {subject} will be here?",
    ), missing="I do not know when the {subject} comes"),
    *_trio("owner", (item, one_of(PEOPLE)), "the {subject} belongs to {value}", told=(
        "the {subject} belongs to {value}",
        "remember that the {subject} belongs to {value}",
        "{value} owns the {subject}",
        "note: the {subject} is from {value}",
        "{value} is the owner of the {subject}",
    ), asked=(
        "who owns the {subject}?",
        "whose is the {subject}?",
        "to whom does the {subject} belong?",
        "tell me who owns the {subject}",
        "do you know the owner of the {subject}?",
    ), missing="I do not know who owns the {subject}"),
)  # fmt: skip

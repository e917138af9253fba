"""Facts in a user's own words: he tells one, talks on, and asks for it later."""

from random import Random
from typing import Final, NamedTuple

from models.domain import Turn, likely
from models.speech.commands import said
from models.speech.homes import PLACES
from models.speech.voice import RELATIVES, lower_case, proper, somebody, upper
from models.vocabulary import (
    COLOURS,
    DAYS,
    DISHES,
    GROCERIES,
    ITEMS,
    MONTHS,
    compose_word,
)

NOTED: Final = "Noted."
UNKNOWN: Final = "You have not told me that."


class Kind(NamedTuple):
    """A kind of fact: how it is told and asked for, with the same slots."""

    told: tuple[str, ...]
    asked: tuple[str, ...]


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split("|") if part.strip())


def _k(told: str, asked: str) -> Kind:
    return Kind(_parts(told), _parts(asked))


# v is what is asked for; the others are what it is about.
KINDS: Final = (
    _k("my {pet} is called {v} | our {pet} is called {v} | my {pet}'s name is {v} | "
       "the {pet}'s name is {v} | we named our {pet} {v} | we have a {pet} called {v} | "
       "I have a {pet} named {v}",
       "what's my {pet}'s name? | what is my {pet} called? | what's our {pet} called? | "
       "do you know my {pet}'s name? | how is my {pet} called? | "
       "tell me the name of my {pet} | what did we name the {pet}?"),
    _k("my {rel} is called {v} | my {rel}'s name is {v} | {v} is my {rel} | "
       "I live with my {rel} {v} | my {rel} {v} lives with me | this is my {rel} {v}",
       "what's my {rel} called? | what is my {rel}'s name? | who is my {rel}? | "
       "do you remember my {rel}'s name? | what's the name of my {rel}?"),
    _k("I live here with {v} | I live with my {rel} {v} | I share the flat with {v} | "
       "{v} and I live here together",
        "who lives with me? | who shares the flat with me? |"
        " who else lives here?"),
    _k("the {thing} goes out on {day} | the {thing} are collected on {day} | "
       "they empty the {thing} on {day} | {thing} day is {day}",
       "what day does the {thing} go out? | when are the {thing} collected? | "
       "on which day is the {thing}? | when is {thing} day? | "
       "when do they empty the {thing}?"),
    _k("the {item} is {where} | I put the {item} {where} | the {item} is kept {where} | "
       "I hid the {item} {where} | I left the {item} {where} | "
       "you'll find the {item} {where} | {name} put the {item} {where}",
       "where is the {item}? | where did I put the {item}? | "
       "where do we keep the {item}? | "
       "where's the {item}? | do you know where the {item} is? | "
       "I can't find the {item}, where is it?"),
    _k("I parked the {car} {street} | the {car} is parked {street} | "
       "I left the {car} {street} | the {car} is {street}",
        "where is the {car}? | where did I park the {car}? | "
        " where's my {car}? | do you remember where the {car} is?"),
    _k("{name} is allergic to {food} | {name} can't eat {food} | "
       "{name} doesn't eat {food} | {name} gets sick from {food} | "
       "{name} must not have {food}",
       "what can't {name} eat? | what does {name} not eat? | "
       "is {name} allergic to something? | what should I not cook for {name}?"),
    _k("{v} borrowed my {item} | {v} has my {item} | "
       "I gave the {item} to {v} | {v} took the {item} | my {item} is with {v}",
       "who has my {item}? | who borrowed my {item}? | who did I lend the {item} to? | "
       "who took the {item}? | who did I give the {item} to? | where is my {item}?"),
    _k("the {secret} is {code} | the {secret} is now {code} | our {secret} is {code} | "
       "remember the {secret}: {code} | {code} is the {secret}",
       "what's the {secret}? | what is the {secret} again? | what was the {secret}? | "
       "tell me the {secret} | can you give me the {secret}? | do you know the {secret}? | "
       "I forgot the {secret}"),
    _k("there are {plant} growing in the {place} | "
       "I sowed {plant} in the {place} today",
        "what's growing in the {place}? |"
        " what did I sow in the {place}?"),
    _k("I put the {plant} in the {place}",
        "where did I plant the {plant}? | where are the {plant}?"),
    _k("my {pro} is {v} | my {pro} is called {v} | my {pro}'s name is {v} | "
       "I go to {v}, my {pro} | {v} is my {pro}",
       "what's my {pro} called? | who is my {pro}? | what is my {pro}'s name? | "
       "do you know who my {pro} is? | what's the name of my {pro}?"),
    _k("the {baby} usually wakes up at {time} | "
       "my {baby} gets up at {time} every day",
        "when does the {baby} wake up? | when does our {baby} usually get up? |"
        " what time does the {baby} wake up?"),
    _k("the {baby} goes to bed at {time} | our {baby} sleeps from {time} | "
       "{baby} bedtime is {time}",
        "when does the {baby} go to bed? | what time is {baby} bedtime? |"
        " when does the {baby} sleep?"),
    _k("the {event} is on {day} | the {event} is on {day} at {time} | "
       "we have the {event} on {day} | I have a {event} on {day} | "
       "the {event} was moved to {day}",
       "when is the {event}? | what day is the {event}? | "
       "on which day do I have the {event}? | when's my {event}? | "
       "do you know when the {event} is?"),
    _k("the {event} starts at {time} | the {event} is at {time} | "
       "I have to be at the {event} at {time}",
        "when does the {event} start? | what time is the {event}? | at what time is my {event}? |"
        " when do I have to be at the {event}?"),
    _k("{name}'s birthday is on {date} | {name} was born on {date} | {name} turns {num} on {date}",
        "when is {name}'s birthday? | when was {name} born? | what day is {name}'s birthday? |"
        " when does {name} have a birthday?"),
    _k("my favourite {sort} is {v2} | I like {v2} best, it's my favourite {sort} | "
       "the {sort} I like most is {v2} | my favorite {sort} is {v2}",
       "what's my favourite {sort}? | do you know my favourite {sort}? | "
       "what is my favorite {sort}? | which {sort} do I like best? | "
       "tell me my favourite {sort}"),
    _k("{name} likes {food} | {name} loves {food} | {name}'s favourite is {food} | "
       "{name} is fond of {food} | {name} only drinks {food}",
       "what does {name} like? | what does {name} love? | what can I offer {name}? | "
       "what's {name}'s favourite? | what is {name} fond of?"),
    _k("{name} is coming on {day} | {name} visits us on {day} | "
       "{name} arrives on {day} at {time} | we expect {name} on {day} | "
       "{name} will stay until {day}",
       "when is {name} coming? | when does {name} visit us? | when does {name} arrive? | "
       "which day do we expect {name}? | until when does {name} stay?"),
    _k("{name} lives in {city} | {name} moved to {city} | {name} has a house in {city} | "
       "{name} works in {city}",
        "where does {name} live? | where did {name} move? | which city is {name} in? |"
        " where does {name} work?"),
    _k("I work at {city} | I work as a {job} | I am a {job} | I'm a {job} by trade",
        "what do I do for a living? | what's my job? | where do I work? | what do I work as?"),
    _k("{name} works as a {job} | {name} is a {job} | my friend {name} is a {job}",
        "what does {name} do? | what is {name}'s job? | what does {name} work as?"),
    _k("I take my {med} at {time} | I have to take the {med} at {time} | "
       "the {med} is at {time} every day",
        "when do I take my {med}? | what time is my {med}? | when do I have to take the {med}?"),
    _k("I paid {num} euros for the {item} | the {item} cost {num} euros | "
       "the {item} was {num} pounds",
        "how much was the {item}? | what did the {item} cost? | what did I pay for the {item}? |"
        " how much did I pay for the {item}?"),
    _k("the {car} needs {num} litres of oil | the {car} has {num} miles on it | "
       "the {car} is {num} years old",
        "what did I say about the {car}? | how old is the {car}? |"
        " how much oil does the {car} need?"),
    _k("my phone number is {code} | my number is {code} | {name}'s number is {code} | "
       "my locker is number {code}",
        "what's my phone number? | what is my number? | what's {name}'s number? |"
        " which locker is mine?"),
    _k("my shoe size is {num} | I wear size {num} | my shirt size is {num}",
        "what's my size? | what size do I wear? | what is my shoe size? | what's my shirt size?"),
    _k("we're going to {city} in {month} | our holiday in {city} is in {month} | "
       "we fly to {city} in {month}",
        "when are we going to {city}? | where are we going in {month}? | where is our holiday? |"
        " when do we fly to {city}?"),
    _k("the {event} costs {num} euros | I owe {name} {num} euros | {name} owes me {num} euros",
        "how much do I owe {name}? | what does {name} owe me? | what does the {event} cost?"),
    _k("the {item} is broken | the {item} needs a new battery | "
       "the {item} makes a strange noise | the {item} is at the repair shop",
        "what's wrong with the {item}? | what about the {item}? |"
        " what did I say about the {item}? | is something wrong with the {item}?"),
    _k("I fed the {pet} at {time} | the {pet} gets {food} for dinner | the {pet} was fed at {time}",
        "when did I feed the {pet}? | what does the {pet} get? | has the {pet} been fed? |"
        " when was the {pet} fed?"),
    _k("we're reading {v} to the kids | I'm reading a book called {v} | the book is called {v}",
        "what's the book called? | what book am I reading? | what are we reading?"),
    _k("my name is {v} | I'm {v} | I am called {v} | hi, I'm {v} | you can call me {v} | "
       "hello, my name is {v}",
        "what's my name? | who am I? | do you know my name? | what am I called? |"
        " do you remember my name?"),
    _k("I come from {city} | I was born in {city} | my family is from {city}",
        "where do I come from? | where was I born? | where is my family from?"),
    _k("{name} is my {rel}'s {rel2} | {name} is the {pro} of my {rel}",
        "who is {name}? | do you know who {name} is? | what did I tell you about {name}?"),
    _k("I have {num} {things} | we own {num} {things} | there are {num} {things} in the {place}",
        "how many {things} do I have? | how many {things} are there? |"
        " how many {things} do we own?"),
    _k("the {place} is painted {colour} | we painted the {place} {colour} | the {item} is {colour}",
        "what colour is the {place}? | which colour is the {item}? |"
        " what colour did we paint the {place}? | what color is the {item}?"),
    _k("the {pro} comes on {day} | the {pro} will be here on {day} at {time} | "
       "I called the {pro} for {day}",
        "when does the {pro} come? | when will the {pro} be here? | what day is the {pro} coming?"),
    _k("{name} is in the {place} | {name} sleeps in the {place} | the {pet} sleeps in the {place}",
        "where is {name}? | where does {name} sleep? | where does the {pet} sleep?"),
    _k("I bought {food} at {city} | I bought the {item} in {city} | the {item} comes from {city}",
        "where did I buy the {item}? | where does the {item} come from? |"
        " where did I buy the {food}?"),
)  # fmt: skip
_LEADS: Final = (
    "remember that ", "please remember that ", "note that ", "keep in mind that ",
        "don't forget that ", "by the way, ", "just so you know, ",
    "for your information, ", "remember: ", "note: ", "FYI, ", "you should know that ",
        "please note that ", "remember, ", "I want you to remember that ",
    "could you remember that ", "please keep in mind that ", "oh, and ", "so, ", "hey, ",
        "listen, ",
)  # fmt: skip
_AFTER: Final = (
    " Remember that.",
    " Please remember.",
    " Don't forget it.",
    " Got that?",
    " Just so you know.",
    " Note that, please.",
)
_ASKS: Final = (
    "remind me, ", "tell me, ", "so, ", "hey, ", "sorry, ", "do you remember: ", "I forgot, ",
        "quick question: ", "by the way, ", "one thing, ", "OK, ",
    "please tell me, ", "a friend asks: ", "{name} wants to know: ", "I'm not sure: ", "well, ",
)  # fmt: skip
_PETS: Final = (
    "cat",
    "dog",
    "hamster",
    "parrot",
    "rabbit",
    "goldfish",
    "horse",
    "turtle",
    "budgie",
    "kitten",
    "puppy",
    "pony",
    "lizard",
)
_PROS: Final = (
    "dentist",
    "doctor",
    "plumber",
    "lawyer",
    "hairdresser",
    "teacher",
    "landlord",
    "boss",
    "gardener",
    "vet",
    "trainer",
    "baker",
    "tutor",
    "neighbour",
    "cleaner",
    "mechanic",
    "therapist",
)
_EVENTS: Final = (
    "party",
    "meeting",
    "concert",
    "wedding",
    "exam",
    "interview",
    "school fair",
    "dinner",
    "game",
    "lesson",
    "appointment",
    "parents' evening",
    "training",
    "opening",
    "flight",
    "choir",
    "yoga class",
    "checkup",
)
_SECRETS: Final = (
    "wifi password",
    "guest wifi password",
    "door code",
    "alarm code",
    "gate code",
    "safe combination",
    "PIN",
    "garage code",
    "wifi name",
    "licence plate",
    "garden shed code",
    "tablet PIN",
    "network key",
    "login",
    "membership number",
    "bike lock code",
)
_CITIES: Final = (
    "Leeds",
    "Boston",
    "Hamburg",
    "Porto",
    "Geneva",
    "Dallas",
    "Kyoto",
    "Cork",
    "Bristol",
    "Naples",
    "Denver",
    "Lyon",
    "Perth",
    "Ghent",
    "Malmo",
    "Seville",
    "Austin",
    "York",
    "Turin",
    "Bath",
)
_PLANTS: Final = (
    "roses",
    "carrots",
    "beans",
    "tulips",
    "basil",
    "potatoes",
    "lettuce",
    "strawberries",
    "sunflowers",
    "pumpkins",
    "herbs",
    "peas",
    "onions",
    "mint",
    "leeks",
    "radishes",
    "lavender",
    "chillies",
)
_JOBS: Final = (
    "nurse",
    "baker",
    "teacher",
    "pilot",
    "driver",
    "cook",
    "writer",
    "lawyer",
    "farmer",
    "singer",
    "carpenter",
    "painter",
    "chemist",
    "judge",
    "waiter",
    "designer",
)
_SPOTS: Final = (
    "under the",
    "behind the",
    "next to the",
    "on the",
    "in the",
    "on top of the",
    "inside the",
    "beside the",
    "below the",
    "near the",
)
_FURNITURE: Final = (
    "doormat",
    "flower pot",
    "vase",
    "shelf",
    "sofa",
    "drawer",
    "cupboard",
    "stairs",
    "box",
    "wardrobe",
    "jar",
    "fridge",
    "bench",
    "bucket",
    "piano",
    "stone",
    "basket",
    "chest",
    "mirror",
    "hedge",
    "barrel",
    "suitcase",
    "sink",
    "carpet",
)
_ROADS: Final = (
    "Street",
    "Road",
    "Lane",
    "Avenue",
    "Square",
    "Hill",
    "Park",
    "Court",
    "Close",
    "Drive",
    "Way",
)


_FIRST: Final = (
    "Church", "Station", "High", "King", "Queen", "Oak", "River", "Baker", "Bridge", "North",
)  # fmt: skip
_STOPS: Final = ("station", "airport", "mall", "office", "cinema", "gym", "school", "market")


def _word(rng: Random, words: tuple[str, ...], made_up: float = 0.25) -> str:
    return compose_word(rng) if likely(rng, made_up) else rng.choice(words)


def _slots(rng: Random) -> dict[str, str]:
    colour = ("blue", "red", "old", "green", "big", "white", "second", "wooden", "small", "black")
    look = f"{rng.choice(colour)} " if likely(rng, 0.5) else ""
    spot = f"{rng.choice(_SPOTS)} {look}{_word(rng, _FURNITURE)}"
    first = proper(rng) if likely(rng, 0.6) else rng.choice(_FIRST)
    road = f"{first} {rng.choice(_ROADS)}"
    street = rng.choice(
        (
            f"on {road}",
            f"in {road}",
            f"at the {_word(rng, _STOPS)}",
            f"behind the {_word(rng, ('church', 'school', 'shop', 'hotel'))}",
        )
    )
    code = "".join(rng.choice("0123456789") for _ in range(rng.randrange(3, 8)))
    secret = rng.choice(
        (
            code,
            code,
            f"{compose_word(rng)}{code[:2]}",
            compose_word(rng),
            f"{compose_word(rng).capitalize()}-{code[:3]}",
        )
    )
    sort, liked = rng.choice(
        (
            ("colour", COLOURS),
            ("food", DISHES),
            ("fruit", GROCERIES),
            ("day", DAYS),
            ("month", MONTHS),
            ("drink", ("tea", "cocoa", "water", "coffee", "juice", "lemonade")),
            ("animal", _PETS),
            ("city", _CITIES),
            ("flower", _PLANTS),
            ("number", ("7", "3", "12", "42", "100")),
        )
    )
    hour = f"{rng.randrange(24):02d}:{rng.choice(('00', '15', '30', '45', '10', '20'))}"
    return {
        "pet": _word(rng, _PETS, 0.05), "v": somebody(rng), "rel": rng.choice(RELATIVES),
            "rel2": rng.choice(RELATIVES), "day": rng.choice(DAYS),
        "thing": rng.choice(("bins", "recycling", "trash", "paper bin", "rubbish", "garbage",
            "glass", "compost", "green bin")),
        "item": _word(rng, ITEMS), "where": spot, "name": somebody(rng), "car": rng.choice(("car",
            "bike", "van", "motorbike", "scooter", "truck", "trailer", "bus")),
        "street": street, "food": _word(rng, (*GROCERIES, *DISHES, "nuts", "fish", "shellfish",
            "gluten", "wheat", "soy", "strawberries", "oats")), "secret": rng.choice(_SECRETS),
            "code": secret,
        "plant": _word(rng, _PLANTS), "place": _word(rng, PLACES, 0.1), "pro": rng.choice(_PROS),
            "baby": rng.choice(("baby", "son", "daughter", "toddler", "twins", "kids", "grandson",
            "boy", "girl")),
        "time": hour if likely(rng, 0.6) else rng.choice(("six", "half past seven", "7 pm",
            "9 am", "noon", "ten", "5:45", "8:20", "quarter to nine")),
        "event": _word(rng, _EVENTS, 0.05),
            "date": f"{rng.randrange(1, 29)} {rng.choice(MONTHS)}", "num": str(rng.randrange(2,
            99)), "sort": sort, "v2": _word(rng, tuple(liked), 0.15),
        "city": compose_word(rng).capitalize() if likely(rng, 0.4) else rng.choice(_CITIES),
            "job": _word(rng, _JOBS, 0.1), "med": rng.choice(("medicine", "pills", "tablets",
            "vitamins", "drops", "insulin", "cough syrup")),
        "month": rng.choice(MONTHS), "things": _word(rng, ("chairs", "bikes", "books", "keys",
            "hens", "trees", "lamps", "plates", "bottles", "tents", "guitars", "cats"), 0.1),
            "colour": rng.choice(COLOURS),
    }  # fmt: skip


class Fact(NamedTuple):
    """A fact that was told: the words that are given back, and the questions for it."""

    words: str
    asked: tuple[str, ...]
    about: str


def tell(rng: Random) -> tuple[str, Fact]:
    """Return what a user says to tell a fact, and the fact."""
    kind, slots = rng.choice(KINDS), _slots(rng)
    template = rng.choice(kind.told)
    keys = {key for key in slots if f"{{{key}}}" in template}
    asked = tuple(
        one for one in kind.asked if all(f"{{{key}}}" not in one or key in keys for key in slots)
    )
    words = template.format(**slots)
    way = rng.random()
    if way < 0.45:
        words = upper(words) if likely(rng, 0.8) else words
        user = f"{words}{rng.choice(('.', '.', '!', ''))}"
        if user.endswith(".") and likely(rng, 0.25):
            user += rng.choice(_AFTER)
    else:
        lead = rng.choice(_LEADS)
        user = f"{upper(lead) if likely(rng, 0.8) else lead}{words}{rng.choice(('.', '.', ''))}"
    if likely(rng, 0.08):
        words, user = lower_case(words, ()), lower_case(user, ())
    return user, Fact(words, tuple(one.format(**slots) for one in asked), template)


def _asked(rng: Random, text: str) -> str:
    if likely(rng, 0.25):
        text = rng.choice(_ASKS).format(name=somebody(rng)) + text
    text = upper(text) if likely(rng, 0.85) else text
    return lower_case(text, ()).rstrip("?") if likely(rng, 0.08) else text


def tell_turn(rng: Random, facts: list[Fact]) -> Turn | None:
    """Return a turn that tells a fact, which is kept."""
    user, fact = tell(rng)
    if not fact.asked or any(
        one.about == fact.about or set(one.asked) & set(fact.asked) for one in facts
    ):
        return None
    facts.append(fact)
    return said("tell", user, NOTED)


def ask_turn(rng: Random, facts: list[Fact]) -> Turn | None:
    """Return a question for a fact that was told."""
    if not facts:
        return None
    fact = rng.choice(facts)
    return said("ask", _asked(rng, rng.choice(fact.asked)), f"You said: {fact.words}.")


def unknown_turn(rng: Random, facts: list[Fact]) -> Turn | None:
    """Return a question for a fact that was not told."""
    _, fact = tell(rng)
    known = {one.about for one in facts} | {ask for one in facts for ask in one.asked}
    kinds = [kind for kind in KINDS if fact.about in kind.told]
    if (
        not fact.asked
        or any(one.about in kind.told for one in facts for kind in kinds)
        or known & set(fact.asked)
    ):
        return None
    return said("unknown", _asked(rng, rng.choice(fact.asked)), UNKNOWN)

"""Voice of a user: reasons beside a request, numbers in words, slips of the hand."""

import re
from collections.abc import Sequence
from random import Random
from typing import Final

from models.domain import likely
from models.speech.homes import PLACES
from models.vocabulary import DAYS, DISHES, GROCERIES, ITEMS, PEOPLE, VISITORS, compose_word
from models.wording import is_command, polite

_ONES: Final = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
)  # fmt: skip
_TENS: Final = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """Return a number from 0 to 999 in words."""
    if number < len(_ONES):
        return _ONES[number]
    if number < 100:
        ten, one = divmod(number, 10)
        return _TENS[ten - 2] + (f"-{_ONES[one]}" if one else "")
    hundred, rest = divmod(number, 100)
    head = f"{_ONES[hundred]} hundred"
    return f"{head} and {in_words(rest)}" if rest else head


_SPANS: Final[dict[str, tuple[str, ...]]] = {
    "30": ("half an hour", "half an hour", "thirty minutes"),
    "60": ("an hour", "one hour", "1 hour"),
    "15": ("a quarter of an hour", "fifteen minutes"),
    "45": ("three quarters of an hour", "forty five minutes"),
    "90": ("an hour and a half", "one and a half hours"),
    "1": ("a minute", "one minute"),
    "120": ("two hours", "2 hours"),
    "2": ("a couple of minutes", "two minutes"),
}


def said_number(rng: Random, value: str) -> str:
    """Return a number as it is said, now and then in words."""
    if not value.isdigit() or int(value) > 999 or not likely(rng, 0.15):
        return value
    words = in_words(int(value))
    return words if likely(rng, 0.6) else words.replace("-", " ")


def said_minutes(rng: Random, text: str, minutes: str) -> str:
    """Return a text that has `{minutes} minutes` with the span as people say it."""
    spans = _SPANS.get(minutes)
    if spans and likely(rng, 0.5):
        for form in ("{minutes} minutes", "{minutes} min"):
            if form in text:
                return text.replace(form, rng.choice(spans), 1)
    if likely(rng, 0.08):
        text = text.replace("{minutes} minutes", "{minutes} min")
    return text.replace("{minutes}", said_number(rng, minutes))


def said_time(rng: Random, time: str) -> str:
    """Return a time of day as people say it."""
    hour, minute = map(int, time.split(":"))
    if likely(rng, 0.55):
        return time
    ways = [f"{hour}:{minute:02d}"]
    twelve, half = (hour - 1) % 12 + 1, "am" if hour < 12 else "pm"
    ways += [f"{twelve}:{minute:02d} {half}", f"{twelve}:{minute:02d}{half}"]
    if not minute:
        ways = [f"{twelve} {half}", f"{twelve}{half}", f"{hour}:00"]
        ways += [f"{in_words(twelve)} in the morning"] if 4 < hour < 12 else []
        ways += [f"{in_words(twelve)} in the evening"] if hour > 17 else []
        ways += ["noon"] * 3 if hour == 12 else ["midnight"] * 3 if hour == 0 else []
    if minute == 30 and 0 < hour < 12:
        ways += [f"half past {in_words(hour)}", f"half past {in_words(hour)} in the morning"]
    return rng.choice(ways)


_REASONS: Final = (
    "I'm going out", "I'm cold", "I'm tired", "it's late", "it's getting dark", "it's so hot today",
    "I can't sleep", "I have a headache", "we have visitors", "{person} is coming over",
    "{person} is here", "{person} is asleep", "{person} just left", "{person} will be here soon",
    "{person} wants to sleep", "{person} is at the door", "the kids are in bed",
        "the dog is barking",
    "the {visitor} is here", "the {visitor} is coming on {day}", "I'm waiting for the {visitor}",
    "I need the {item}", "I can't find the {item}", "I'm looking for my {item}", "I lost my {item}",
    "I forgot my {item} in there", "I have to work", "I'm working from home", "I'm in a meeting",
    "I'm having a bath", "I'm about to {do}", "I want to {do}", "I'd like to {do}",
    "I'm going to {do}", "we're going to {do}", "we're about to {do}", "I have to {do}",
    "I've finished my {dish}", "the {dish} is ready", "I'm making {dish}", "we're having {dish}",
    "I bought {grocery}", "we're out of {grocery}", "the sun is too strong", "the sun is shining",
    "it's raining", "it's snowing outside", "it's windy", "it looks like rain", "it's a lovely day",
    "I can't see a thing", "I can't hear anything", "it's very loud in here", "it's too quiet",
    "it smells in here", "it's humid today", "the air is bad in here", "my feet are cold",
    "the {place} is a mess", "I'm in the {place}", "I'm heading to the {place}", "I'm upstairs",
    "I'll be home in ten minutes", "I'm on my way home", "we're back", "I just got home",
    "I'm leaving in five minutes", "nobody is home", "nobody needs it now", "we're done here",
    "I'm done with it", "that's enough", "that's better", "I don't need it any more",
    "my hands are full", "I'm on the phone", "the baby is crying", "the film is starting",
    "the guests have left", "the guests are here", "dinner is nearly done", "we're eating soon",
    "I don't like strangers looking in", "I think I heard something", "someone is at the gate",
    "it's been a long day", "what a day", "good evening", "good afternoon", "hello", "morning",
    "I feel sick", "I'm bored", "I'm awake", "I overslept", "it's time", "it's {day} already",
    "the electricity bill is too high", "we should save energy", "I nearly tripped",
    "the cat wants to go out", "I want to read", "I need to concentrate", "I need some quiet",
    "my {rel} is visiting", "my {rel} is on the way", "my {rel} needs to rest",
        "I promised my {rel}",
    "I'm hungry", "I need a break", "I'm sweating", "the floor is wet", "there's dust everywhere",
    "there are crumbs everywhere", "the plants look dry", "I hear the rain",
        "the neighbours are loud",
    "I spilled some {grocery}", "the lesson begins soon", "the match is on", "my show is on",
)  # fmt: skip
_AFTERS: Final = (
    "while I {do}", "before I {do}", "so I can {do}", "when you can", "as soon as possible",
    "before {person} gets here", "for {person}", "for my {rel}", "for the {visitor}", "for a while",
    "because {reason}", "since {reason}", "as {reason}", "so that {person} can sleep",
        "for tonight",
    "if that's OK", "if you don't mind", "once more", "straight away", "before it gets dark",
    "before it rains", "while we {do}", "so we can {do}", "for the night", "for the guests",
)  # fmt: skip
_DOES: Final = (
    "cook", "read", "sleep", "take a nap", "do some yoga", "have a bath", "watch a film", "paint",
    "work", "do the dishes", "iron my shirt", "play with the kids", "go for a run", "eat",
    "water the flowers", "walk the dog", "bake a cake", "make some tea", "clean up", "study",
    "listen to music", "get dressed", "repair the {item}", "find the {item}", "look for the {item}",
    "wash the {item}", "have lunch", "have breakfast", "practise the guitar", "write a letter",
    "go to sleep", "leave", "go shopping", "cut the grass", "meet {person}", "call my {rel}",
    "pack the {item}", "play cards", "do my homework", "feed the cat", "hang up the washing",
)  # fmt: skip
RELATIVES: Final = (
    "mother", "father", "mum", "dad", "brother", "sister", "aunt", "uncle", "wife", "husband",
    "son", "daughter", "cousin", "boss", "neighbour", "friend", "flatmate", "grandma", "teacher",
)  # fmt: skip


def proper(rng: Random) -> str:
    """Return a made-up proper name."""
    return compose_word(rng).capitalize()


def somebody(rng: Random) -> str:
    """Return a name of a person, with a title now and then."""
    name = proper(rng) if likely(rng, 0.35) else rng.choice(PEOPLE)
    if likely(rng, 0.12):
        return f"{rng.choice(('Mr', 'Mrs', 'Ms', 'Dr', 'Aunt', 'Uncle', 'Miss'))} {name}"
    return name


def clause(rng: Random, templates: Sequence[str] = _REASONS) -> str:
    """Return a clause that tells why, or something beside the point."""
    text = rng.choice(templates)
    for _ in range(3):
        if "{" not in text:
            break
        fields = {
            "person": somebody(rng),
            "visitor": rng.choice(VISITORS),
            "item": compose_word(rng) if likely(rng, 0.25) else rng.choice(ITEMS),
            "day": rng.choice(DAYS),
            "dish": rng.choice(DISHES),
            "grocery": rng.choice(GROCERIES),
            "place": rng.choice(PLACES),
            "do": rng.choice(_DOES),
            "rel": rng.choice(RELATIVES),
            "reason": rng.choice(_REASONS),
        }
        text = text.format(**fields)
    return text


def small(text: str) -> str:
    """Return a text that goes on in a sentence."""
    first = text.partition(" ")[0].rstrip(",.!")
    if first in {"I", "I'm", "I'll", "I've", "I'd", *PEOPLE}:
        return text
    return text[:1].lower() + text[1:]


def upper(text: str) -> str:
    """Return a text that begins a sentence."""
    return text[:1].upper() + text[1:]


_SLIPS: Final = {
    "turn": "trun", "the": "teh", "please": "pls", "could": "coud", "switch": "swich",
    "off": "of", "what": "waht", "lights": "ligths", "you": "u", "percent": "per cent",
    "degrees": "degres", "close": "clsoe", "volume": "volum", "minutes": "minuts", "for": "fro",
    "kitchen": "kitchn", "temperature": "temprature", "thanks": "thx", "which": "wich",
    "bedroom": "bedrom", "with": "wiht", "open": "opne", "unlock": "unlok", "start": "strat",
}  # fmt: skip


def _slip(rng: Random, text: str, kept: Sequence[str]) -> str:
    words = text.split(" ")
    held = {word for one in kept for word in one.split()}
    places = [i for i, w in enumerate(words) if w.lower() in _SLIPS and w not in held]
    if places:
        at = rng.choice(places)
        words[at] = _SLIPS[words[at].lower()]
        return " ".join(words)
    places = [i for i, w in enumerate(words) if w.isalpha() and len(w) > 4 and w not in held]
    if not places:
        return text
    at = rng.choice(places)
    word, cut = words[at], rng.randrange(1, len(words[at]) - 2)
    words[at] = rng.choice((
        word[:cut] + word[cut + 1 :],
        word[:cut] + word[cut + 1] + word[cut] + word[cut + 2 :],
        word[:cut] + word[cut] + word[cut:],
    ))  # fmt: skip
    return " ".join(words)


def lower_case(text: str, kept: Sequence[str]) -> str:
    """Return a text in small letters but for the words that an answer copies."""
    held = sorted({one for one in kept if one and one.lower() != one}, key=len, reverse=True)
    if not held:
        return text.lower()
    pattern = "(" + "|".join(map(re.escape, held)) + ")"
    parts = re.split(pattern, text)
    return "".join(part if part in held else part.lower() for part in parts)


_CALLS: Final = ("hey Hearth, ", "Hearth, ", "hey, ", "OK Hearth, ", "hi, ", "hello Hearth, ",
    "um, ",
                 "oh, ", "right, ", "OK, ", "so, ", "well, ", "quick one: ",
                     "excuse me, ")  # fmt: skip
_TAGS: Final = (", please", " please", ", thanks", ", would you?", ", will you?", ", OK?",
                ", thank you", ", could you?", ", if you can", ", can you?", " for me")  # fmt: skip
_GREETINGS: Final = ("Good morning", "Good evening", "Hello", "Hi", "Hi there", "Hey", "OK",
    "Right",
                     "Thanks", "Great", "Oh no", "Listen", "Sorry", "Well")  # fmt: skip


def voiced(
    rng: Random, text: str, kept: Sequence[str] = (), *, told: bool = False, plain: float = 0.42
) -> str:
    """Return a request as somebody says it; `kept` are words that an answer copies.

    What is `told` ends with words that are passed on, so nothing may follow them.
    """
    asks = text.endswith("?")
    if is_command(text) and likely(rng, 0.42):
        text = f"please {text}" if told else polite(rng, text)
        asks = text.endswith("?")
    elif not told and not asks and likely(rng, 0.25):
        text += rng.choice(_TAGS)
        asks = text.endswith("?")
    if not likely(rng, plain):
        way = rng.random()
        if way < 0.32:
            mark = rng.choice((". ", ". ", "! ", ", ", ", so ", " - ", "; "))
            body = upper(text) if mark in {". ", "! "} else small(text)
            text = f"{upper(clause(rng))}{mark}{body}"
        elif way < 0.42:
            mark = rng.choice(("! ", ", ", ". "))
            text = (
                f"{rng.choice(_GREETINGS)}{mark}{upper(text) if likely(rng, 0.5) else small(text)}"
            )
        elif way < 0.62 and not told and not asks:
            text = f"{text} {clause(rng, _AFTERS)}"
        elif way < 0.85 and not told:
            mark = "" if asks else rng.choice((",", ",", ".", ":", " -", "!"))
            then = clause(rng)
            text = f"{text}{mark} {upper(then) if asks or mark in {'.', '!'} else then}"
            asks = False
        elif way < 0.93:
            text = f"{rng.choice(_CALLS)}{small(text)}"
    if likely(rng, 0.8):
        text = upper(text)
    if not asks and not text.endswith(("?", "!", ".")):
        text += rng.choice((".", ".", ".", "", "", "!"))
    style = rng.random()
    if style < 0.12:
        text = lower_case(text, kept).rstrip(".!?")
    elif style < 0.16:
        text = text.rstrip("?.!")
    return _slip(rng, text, kept) if likely(rng, 0.04) else text

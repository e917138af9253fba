"""Fields of the results of tools, and the questions that they answer."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Final

from models.domain import likely
from models.speech.homes import PLACES
from models.speech.voice import proper, somebody
from models.vocabulary import DAYS, DISHES, GROCERIES, ITEMS, compose_word


def _from(words: tuple[str, ...], made_up: float) -> Callable[[Random], str]:
    return lambda rng: compose_word(rng) if likely(rng, made_up) else rng.choice(words)


Field = tuple[tuple[str, ...], Callable[[Random], Any], tuple[str, ...]]


def _n(low: int, high: int) -> Callable[[Random], Any]:
    return lambda rng: (
        rng.randrange(low, high) if likely(rng, 0.75) else round(rng.uniform(low, high), 1)
    )


def _clock(rng: Random) -> str:
    return f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"


def _some(words: tuple[str, ...], made_up: float = 0.3) -> Callable[[Random], Any]:
    return lambda rng: list(
        dict.fromkeys(
            compose_word(rng) if likely(rng, made_up) else rng.choice(words)
            for _ in range(rng.randrange(1, 5))
        )
    )


_SKY: Final = (
    "rain",
    "sunny",
    "cloudy",
    "snow",
    "fog",
    "storm",
    "clear",
    "windy",
    "showers",
    "hail",
)

_DOES: Final = ("wins", "meets", "leaves", "buys", "finds")
_LIKE: Final = ("small", "kind of", "large", "very old")
FIELDS: Final[Mapping[str, Field]] = {
    "temperature": (("temperature", "temperature", "degrees", "temp", "temperature_c"), _n(-10,
        36), ("what's the temperature?", "is it cold?",
        "how many degrees?", "and how warm is it there?")),
    "condition": (("condition", "weather", "sky", "summary"), _from(_SKY, 0.1), ("is it raining?",
        "how's the weather?", "so what's it like?", "is it sunny?", "what's the sky like?")),
    "wind_kmh": (("wind", "wind_speed", "windspeed_km"), _n(0, 90), ("how strong is the wind?",
        "is it windy?", "what about the wind?", "how much wind is there?")),
    "humidity": (("humidity", "humidity_percent", "value"), _n(10, 99), ("how humid is it?",
        "what's the humidity?", "is it damp?", "so how dry is the air?")),
    "state": (("state", "status", "state"), _from(("on", "off", "open", "closed", "locked",
        "unlocked", "running", "finished", "idle", "paused"), 0.05), ("so, is it on?",
        "what's its state?", "and what is it doing?", "is it finished?", "how is it?", "well?")),
    "minutes_left": (("remaining", "minutes_remaining", "time_left", "minutes_to_go"), _n(1, 120),
        ("how long does it take?", "when is it done?",
        "how much longer?", "how much time is left?")),
    "days_list": (("days", "forecast"), lambda rng: [{"day": day,
        "condition": rng.choice(_SKY)} for day in rng.sample(DAYS, rng.randrange(2, 4))],
        ("which day is nice?", "which day is sunny?", "when does it rain?",
        "which of the days is best?", "how will the days be?", "when can we go out?")),
    "time": (("time", "local_time", "now"), _clock, ("so what time is it?",
        "how late is it there?", "what's the time then?")),
    "line": (("line", "route", "bus"), lambda rng: str(rng.randrange(1, 400)),
        ("which line is it?", "what line?", "which bus do I take?", "what number is it?")),
    "departure": (("departure", "leaves", "departs_at", "time"), _clock, ("when does it leave?",
        "what time is that?", "when do I have to be there?", "when exactly?")),
    "delay": (("delay", "delay_minutes"), _n(0, 40), ("is it late?", "how much is the delay?",
        "is it on time?", "how late is it?")),
    "items": (("items", "entries", "list"), _some((*GROCERIES, *ITEMS)), ("what's on it?",
        "so what's on the list?", "what do I have to get?", "what does it say?",
        "read it to me")),
    "ingredients": (("ingredients", "needs"), _some(GROCERIES), ("what do I need?",
        "what goes in it?", "which ingredients are there?", "what do I have to buy?",
        "what's in it?")),
    "servings": (("servings", "people", "serves"), _n(1, 9), ("for how many people is it?",
        "how many does it serve?", "is it enough for us?")),
    "minutes": (("minutes", "duration", "takes_minutes"), _n(2, 120), ("how long does it take?",
        "how many minutes is that?", "is it quick?", "how much time do I need?")),
    "kwh": (("kwh", "energy_kwh", "usage"), _n(0, 30), ("how much was it?",
        "how much energy is that?", "was it a lot?")),
    "percent": (("percent", "level", "battery"), _n(0, 101), (
        "how much is left?", "what percent is it at?", "is it nearly empty?")),
    "charging": (("charging", "plugged_in"), lambda rng: rng.choice(("yes", "no")),
        ("is it charging?", "is it plugged in?", "does it charge?")),
    "index": (("index", "value"), _n(0, 12), ("how high is it?", "what's the number?",
        "what's the index?")),
    "level": (("level", "rating", "risk"), _from(("low", "high", "moderate", "very high", "none",
        "extreme"), 0), ("is that a lot?", "is it bad?", "how bad is it?",
        "what level is that?")),
    "dish": (("dish", "title", "name"), _from(DISHES, 0.3), ("what's it called?",
        "what is the dish?", "which recipe is it?")),
    "translation": (("translation", "result", "word"), compose_word,
        ("so how do you say it?", "what's the word?", "what is it then?")),
    "unread": (("count", "new_mails", "unseen"), _n(0, 60), ("how many are there?",
        "how many did I get?", "are there many?")),
    "newest_from": (("latest_sender", "last_from", "sender"), somebody, ("who wrote last?",
        "who is the last one from?", "who is it from?", "who wrote to me?")),
    "watts": (("watts", "power_w", "output"), _n(0, 9000), ("how much is it?",
        "how many watts is that?", "what's the power?")),
    "today_kwh": (("today_kwh", "energy_today"), _n(0, 60), ("how much was it today?",
        "what about the whole day?", "and the total for today?")),
    "ppm": (("ppm", "co2", "co2_ppm"), _n(300, 2500), ("how high is it?", "so is the air good?",
        "what's the value?")),
    "price": (("price", "cost", "amount"), lambda rng: round(rng.uniform(1, 900), 2),
        ("how much is it?", "what's the price?", "what does it cost?", "is it expensive?")),
    "change": (("change", "change_percent"), lambda rng: round(rng.uniform(-9, 9), 1),
        ("did it go up?", "how much did it change?", "is it up or down?")),
    "confirmation": (("confirmation", "code", "booking"),
        lambda rng: f"{compose_word(rng)[:3].upper()}{rng.randrange(10, 999)}",
        ("what's the code?", "is it booked?", "what's the confirmation?")),
    "driver": (("driver", "driver_name"), somebody, ("who is driving?",
        "what's the driver called?", "who picks me up?")),
    "headline": (("headline", "title", "news"),
        lambda rng: f"{compose_word(rng)} {rng.choice(_DOES)} {compose_word(rng)}",
        ("what happened?", "what's the headline?", "so what's new?")),
    "meaning": (("meaning", "definition"),
        lambda rng: f"a {rng.choice(_LIKE)} {compose_word(rng)}",
        ("what does it mean?", "so what is it?", "explain it")),
    "km": (("km", "distance_km", "kilometres"), _n(3, 3000), ("how far is that?",
        "how many kilometres?", "is it far?")),
    "hours": (("hours", "travel_hours"), _n(1, 30), ("how long does it take?",
        "how many hours is that?", "how long would I drive?")),
    "status": (("status", "state"), _from(("on its way", "delivered", "delayed", "lost",
        "at the depot", "sent"), 0), ("where is it?", "has it arrived?", "what's the status?")),
    "day": (("day", "date", "on"), lambda rng: rng.choice(DAYS), ("what day is that?",
        "when is it?", "on which day?")),
    "events": (("events", "appointments"), _some(("dentist", "lunch", "meeting", "choir",
        "swimming", "haircut", "school")), ("what do I have?", "so what's planned?",
        "what is it?", "am I busy?")),
    "sunset": (("sunset", "sun_down"), _clock, ("when does it get dark?", "when is sunset?",
        "when does the sun go down?")),
    "sunrise": (("sunrise", "sun_up"), _clock, ("when does it get light?", "when is sunrise?",
        "and when does the sun come up?")),
    "score": (("score", "result"), lambda rng: f"{rng.randrange(6)}:{rng.randrange(6)}",
        ("what was the score?", "who won?", "how did it end?")),
    "opponent": (("opponent", "against"), proper, ("who did they play?", "against whom?",
        "who was the other team?")),
    "reading": (("reading", "value", "count"), _n(10, 90000), ("what does it say?",
        "what's the number?", "how much is it?")),
    "unit": (("unit", "unit"), lambda rng: rng.choice(("kWh", "m3", "litres", "units")),
        ("which unit is that?", "in what unit?", "what unit?")),
    "place": (("place", "location", "room"), lambda rng: rng.choice(PLACES), ("where is it?",
        "so where is it?", "in which room?")),
    "number": (("number", "roll", "result"), _n(1, 21), ("what is it?", "what did you roll?",
        "which number?")),
    "result": (("result", "value", "converted"), _n(1, 5000), ("how much is that?",
        "what's the result?", "so how much?")),
    "picture": (("picture", "file", "url"), lambda rng: f"{compose_word(rng)}.jpg",
        ("what's the file called?", "where is the picture?", "is there a picture?")),
    "bin": (("bin", "type"), _from(("paper", "glass", "green", "black", "plastic"), 0.1),
        ("which bin is it?", "what kind of bin?", "which one goes out?")),
    "litres": (("litres", "volume_l"), _n(10, 3000), ("how many litres is that?",
        "how much water is that?", "what's that in litres?")),
    "text": (("text", "joke", "fact"),
        lambda rng: f"{compose_word(rng)} is no {compose_word(rng)}", ("what is it?", "go on",
        "so tell me")),
    "cinema": (("cinema", "place"), proper, ("where is it on?", "in which cinema?",
        "where do they show it?")),
    "start": (("start", "starts_at"), _clock, ("when does it start?", "what time does it begin?",
        "when is it on?")),
    "shop": (("shop", "store"), proper, ("where can I get it?", "in which shop?",
        "who sells it?")),
}  # fmt: skip

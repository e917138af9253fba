"""Sentences of people who name no device, no amount or several things."""

from models.domain import Intent, Pool
from models.pools import Devices, home_room, of_kind, one_of, plural, state, untouched_of
from models.replies import Answer, by, chosen, every, is_so, says
from models.vocabulary import MUSIC, ROOMS

_WARM = ("thermostat", "heater")
_ROOM = ("room", home_room)
_LIGHT = of_kind("light")
_SOUND = of_kind("speaker", "tv")
_MUSIC = ("value", one_of(MUSIC))
_SWITCHED = ("light", "plug", "fan", "tv", "heater", "speaker", "humidifier", "thermostat")


def _anywhere(name: str, answer: Answer, *phrasings: str, weight: float = 1.0) -> Intent:
    return Intent(name, "everyday", (), answer, phrasings, needs_list=True, weight=weight)


def _in_room(name: str, answer: Answer, *phrasings: str, weight: float = 1.5) -> Intent:
    return Intent(name, "everyday", (_ROOM,), answer, phrasings, needs_list=True, weight=weight)


def _bit(name: str, devices: Devices, answer: Answer, *phrasings: str) -> Intent:
    slots = (("device", devices),)
    return Intent(name, "everyday", slots, answer, phrasings, weight=0.8)


def _all(name: str, action: str, kinds: Pool, *phrasings: str) -> tuple[Intent, Intent]:
    everywhere = tuple(text.replace(" in the {room}", "") for text in phrasings)
    slots = (("kinds", kinds),)
    answer = every(action)
    return (
        Intent(name, "scenes", slots, answer, everywhere, needs_list=True, weight=2),
        Intent(f"{name}_in_room", "scenes", (_ROOM, *slots), answer, phrasings,
               needs_list=True, weight=2),
    )  # fmt: skip


def _asks(name: str, kind: str, answer: Answer, *phrasings: str) -> Intent:
    slots = (("device", untouched_of(kind)), ("state", state))
    return Intent(name, "questions", slots, answer, phrasings, needs_list=True)


INTENTS = (
    _anywhere(
        "cold", chosen("raise_temperature", *_WARM, value="2"),
        "it's too cold in here", "I'm cold", "I'm freezing", "it's chilly in here",
        "it's freezing in here", "warm it up a bit", "make it warmer", "make it a bit warmer",
        "it's cold", "can you make it warmer?", "could you warm it up?", "turn the heat up",
        "turn up the heat", "turn up the heating", "I feel cold", "we're freezing",
    ),
    _in_room(
        "cold_room", chosen("raise_temperature", *_WARM, value="2"),
        "it's too cold in the {room}", "the {room} is too cold", "it's chilly in the {room}",
        "warm up the {room}", "make the {room} warmer", "I'm cold in the {room}",
        "it's freezing in the {room}", "turn up the heating in the {room}",
        "the {room} is freezing", "could you warm up the {room}?",
    ),
    _anywhere(
        "hot", chosen("lower_temperature", *_WARM, value="2"),
        "it's too hot in here", "I'm hot", "it's too warm", "it's boiling in here",
        "cool it down a bit", "make it cooler", "make it a bit cooler", "I'm sweating",
        "it's hot in here", "can you make it cooler?", "turn the heat down",
        "it's too warm in here",
        "turn down the heating", "turn down the heat", "I feel too warm",
    ),
    _in_room(
        "hot_room", chosen("lower_temperature", *_WARM, value="2"),
        "it's too hot in the {room}", "the {room} is too hot", "it's too warm in the {room}",
        "cool down the {room}", "make the {room} cooler", "I'm hot in the {room}",
        "it's boiling in the {room}", "turn down the heating in the {room}",
        "the {room} is too warm", "could you cool down the {room}?",
    ),
    _anywhere(
        "dark", chosen("turn_on", "light"),
        "it's too dark in here", "it's dark in here", "I can't see anything", "I need some light",
        "give me some light", "let there be light", "it's getting dark", "light, please",
        "I can't see a thing", "could you give me some light?",
    ),
    _anywhere(
        "bright", chosen("dim", "light", value="20"),
        "it's too bright in here", "it's too bright", "the light is too bright",
        "the light hurts my eyes", "make it darker", "make it a bit darker", "dim it in here",
        "could we have less light?", "less light, please",
    ),
    _in_room(
        "brighten_room", chosen("brighten", "light", value="20"),
        "brighten the {room}", "brighten up the {room}", "make the {room} brighter",
        "more light in the {room}", "the {room} should be brighter",
        "turn up the light in the {room}",
        "I need more light in the {room}", "could I have more light in the {room}?",
    ),
    _in_room(
        "dim_room", chosen("dim", "light", value="20"),
        "dim the {room}", "dim the light in the {room}", "make the {room} a bit darker",
        "less light in the {room}", "the {room} should be a bit darker", "dim the {room} a bit",
        "turn down the light in the {room}", "could you dim the {room}?",
    ),
    Intent("play_something", "everyday", (_MUSIC,), chosen("play", "speaker"), (
        "play {value}", "play some {value}", "put on {value}", "put on some {value}",
        "I want to hear {value}", "let's hear some {value}", "I feel like {value}",
        "can I have some {value}?", "how about some {value}?", "I'm in the mood for {value}",
    ), needs_list=True, weight=1.5),
    Intent("play_in_room", "everyday", (_ROOM, _MUSIC), chosen("play", "speaker"), (
        "play {value} in the {room}", "play some {value} in the {room}",
        "put on {value} in the {room}", "put on some {value} in the {room}",
        "I want to hear {value} in the {room}", "let's have some {value} in the {room}",
        "I'm in the {room}, play {value}", "some {value} in the {room}",
        "can I have some {value} in the {room}?", "start {value} in the {room}",
    ), needs_list=True, weight=2),
    _anywhere(
        "pause_music", chosen("pause", "speaker"),
        "pause the music", "stop the music", "music off", "turn off the music", "pause",
        "stop playing", "hold the music", "no more music", "can you stop the music?",
    ),
    _in_room(
        "pause_in_room", chosen("pause", "speaker"),
        "pause the music in the {room}", "stop the music in the {room}",
        "turn off the music in the {room}", "no music in the {room}",
        "could you stop the music in the {room}?", "quiet in the {room}, please",
    ),
    _anywhere(
        "next_song", chosen("next", "speaker"),
        "next song", "skip this song", "next track", "skip this one", "play the next song",
        "I don't like this song", "skip it", "next one, please",
    ),
    _anywhere(
        "louder_music", chosen("volume_up", "speaker", value="10"),
        "turn up the music", "turn the music up", "make the music louder", "louder",
        "louder, please",
        "I can't hear the music", "turn up the volume", "volume up", "the music is too quiet",
    ),
    _anywhere(
        "quieter_music", chosen("volume_down", "speaker", value="10"),
        "turn down the music", "turn the music down", "make the music quieter", "quieter",
        "quieter, please", "the music is too loud", "it's too loud", "turn down the volume",
        "volume down", "it's too loud in here",
    ),
    Intent("clean_room", "everyday", (("room", one_of(ROOMS)),),
           chosen("clean", "vacuum", in_room=False), (
        "vacuum the {room}", "clean the {room}", "start vacuuming the {room}", "hoover the {room}",
        "the {room} is dirty", "the {room} needs a clean", "the floor in the {room} is dirty",
        "start cleaning the {room}", "could you vacuum the {room}?", "sweep the {room}",
        "clean up the {room}", "have the {room} cleaned", "do the floor in the {room}",
    ), needs_list=True, weight=2),
    _bit(
        "raise_a_bit", of_kind(*_WARM), by("raise_temperature", "2"),
        "turn up the {device}", "turn the {device} up", "make the {device} warmer",
        "raise the {device}", "turn up the {device} a bit", "turn the {device} up a little",
        "set the {device} higher", "make the {device} a bit warmer", "turn the {device} up a bit",
    ),
    _bit(
        "lower_a_bit", of_kind(*_WARM), by("lower_temperature", "2"),
        "turn down the {device}", "turn the {device} down", "make the {device} cooler",
        "lower the {device}", "turn down the {device} a bit", "turn the {device} down a little",
        "set the {device} lower", "make the {device} a bit cooler", "turn the {device} down a bit",
    ),
    _bit(
        "brighten_a_bit", _LIGHT, by("brighten", "20"),
        "brighten the {device}", "turn up the {device}", "turn the {device} up",
        "make the {device} brighter", "make the {device} a bit brighter",
        "brighten up the {device}",
        "more light from the {device}", "the {device} is too dark", "brighten the {device} a bit",
    ),
    _bit(
        "dim_a_bit", _LIGHT, by("dim", "20"),
        "dim the {device}", "turn down the {device}", "turn the {device} down",
        "make the {device} darker", "make the {device} a bit darker", "dim the {device} a bit",
        "less light from the {device}", "the {device} is too bright", "make the {device} dimmer",
    ),
    _bit(
        "louder", _SOUND, by("volume_up", "10"),
        "turn up the {device}", "turn the {device} up", "make the {device} louder",
        "the {device} is too quiet", "I can't hear the {device}", "louder on the {device}",
        "turn up the volume on the {device}", "volume up on the {device}",
    ),
    _bit(
        "quieter", _SOUND, by("volume_down", "10"),
        "turn down the {device}", "turn the {device} down", "make the {device} quieter",
        "the {device} is too loud", "quieter on the {device}", "lower the volume of the {device}",
        "turn down the volume on the {device}", "volume down on the {device}",
    ),
    *_all(
        "all_off", "turn_off", plural(*_SWITCHED),
        "turn off all the {kinds} in the {room}", "turn off the {kinds} in the {room}",
        "turn all the {kinds} off in the {room}", "switch off all {kinds} in the {room}",
        "all {kinds} off in the {room}", "turn the {kinds} off in the {room}",
        "switch the {kinds} off in the {room}", "kill all the {kinds} in the {room}",
        "{kinds} off in the {room}", "could you turn off all the {kinds} in the {room}?",
    ),
    *_all(
        "all_on", "turn_on", plural(*_SWITCHED),
        "turn on all the {kinds} in the {room}", "turn on the {kinds} in the {room}",
        "turn all the {kinds} on in the {room}", "switch on all {kinds} in the {room}",
        "all {kinds} on in the {room}", "turn the {kinds} on in the {room}",
        "switch the {kinds} on in the {room}", "{kinds} on in the {room}",
        "could you turn on all the {kinds} in the {room}?", "put the {kinds} on in the {room}",
    ),
    *_all(
        "all_closed", "close", plural("blind"),
        "close the {kinds} in the {room}", "close all the {kinds} in the {room}",
        "shut the {kinds} in the {room}", "pull down all the {kinds} in the {room}",
        "draw the {kinds} in the {room}", "put the {kinds} down in the {room}",
        "could you close the {kinds} in the {room}?", "lower the {kinds} in the {room}",
    ),
    *_all(
        "all_open", "open", plural("blind"),
        "open the {kinds} in the {room}", "open all the {kinds} in the {room}",
        "pull up the {kinds} in the {room}", "raise all the {kinds} in the {room}",
        "put the {kinds} up in the {room}", "open up the {kinds} in the {room}",
        "could you open the {kinds} in the {room}?", "draw back the {kinds} in the {room}",
    ),
    *_all(
        "all_locked", "lock", plural("lock"),
        "lock the {kinds} in the {room}", "lock all the {kinds} in the {room}",
        "lock every one of the {kinds} in the {room}", "secure the {kinds} in the {room}",
        "make sure the {kinds} in the {room} are locked",
        "could you lock the {kinds} in the {room}?",
    ),
    *_all(
        "all_unlocked", "unlock", plural("lock"),
        "unlock the {kinds} in the {room}", "unlock all the {kinds} in the {room}",
        "open all the {kinds} in the {room}", "I want all the {kinds} unlocked in the {room}",
        "could you unlock the {kinds} in the {room}?",
        "unlock every one of the {kinds} in the {room}",
    ),
    _asks(
        "ask_locked", "lock", is_so,
        "is the {device} locked?", "did I lock the {device}?", "have I locked the {device}?",
        "is the {device} still locked?", "did we leave the {device} locked?",
        "tell me if the {device} is locked", "can you check if the {device} is locked?",
    ),
    _asks(
        "ask_open", "blind", is_so,
        "is the {device} open?", "did I leave the {device} open?", "is the {device} still open?",
        "tell me if the {device} is open", "have I left the {device} open?",
        "can you check if the {device} is open?",
    ),
    _asks(
        "ask_playing", "speaker", says("The {device} is {state}."),
        "what's playing on the {device}?", "what is the {device} playing?",
        "what's on the {device}?",
        "is something playing on the {device}?", "what do I hear on the {device}?",
    ),
    _asks(
        "ask_set", "thermostat", says("The {device} is {state}."),
        "what's the {device} set to?", "how warm is the {device} set?",
        "what temperature is the {device} set to?", "what's the temperature of the {device}?",
        "how many degrees on the {device}?",
    ),
    _asks(
        "ask_sensor", "sensor", says("The {device} is {state}."),
        "what does the {device} say?", "read the {device}", "what's the {device} reading?",
        "what is the reading of the {device}?", "what does the {device} show?",
        "give me the value of the {device}", "how's the {device}?",
    ),
)  # fmt: skip

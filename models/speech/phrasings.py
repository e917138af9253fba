"""Further phrasings of commands, and further values of their slots."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Final

from models.domain import likely
from models.speech.homes import PLACES
from models.speech.voice import clause, somebody
from models.vocabulary import (
    DISHES,
    GROCERIES,
    ITEMS,
    MUSIC,
    compose_word,
)

_ALL: Final[Mapping[str, tuple[str, ...]]] = {
    "turn_on": (
        "{device} on", "{device} on", "the {device} on", "{device}, on", "put the {device} on",
        "I'd like the {device} on", "I'd love the {device} on", "get the {device} running",
        "the {device} needs to be on", "flip the {device} on", "turn on {device}", "{device}: on",
        "give the {device} some power", "let the {device} run", "have the {device} on",
        "the {device}, please turn it on", "can we have the {device}?", "pop the {device} on",
        "I could use the {device}", "let me have the {device}", "bring the {device} on",
        "make the {device} go on", "I need the {device} running", "kick on the {device}",
        "{device} please", "just the {device}, please", "{device} would be nice now",
    ),
    "turn_off": (
        "{device} off", "{device} off", "the {device} off", "{device}, off", "kill the {device}",
        "I'd like the {device} off", "cut the {device}", "shut off the {device}",
        "shut the {device} off", "shut down the {device}", "cut the power to the {device}",
        "cut power to the {device}", "the {device} can go off", "the {device} needs to be off",
        "flip the {device} off", "turn off {device}", "{device}: off", "no more {device}",
        "take the {device} off", "put out the {device}", "put the {device} off", "power down the {device}",
        "the {device} is on for nothing", "unplug the {device}", "stop the {device}",
        "I don't need the {device} any more", "you can turn off the {device}", "enough {device}",
        "the {device}, please turn it off", "pull the plug on the {device}", "{device} out",
    ),
    "toggle": ("toggle {device}", "flip the {device}", "switch the {device} over", "toggle the {device}"),
    "schedule_on": (
        "have the {device} come on at {time}", "turn on the {device} at {time}",
        "at {time} turn on the {device}", "{device} on at {time}", "switch the {device} on at {time}",
        "let the {device} start at {time}", "I want the {device} on from {time}",
        "make the {device} come on at {time}", "the {device} should go on at {time}",
    ),
    "schedule_off": (
        "have the {device} go off at {time}", "turn off the {device} at {time}",
        "at {time} turn off the {device}", "{device} off at {time}", "switch the {device} off at {time}",
        "the {device} can run until {time}", "leave the {device} on until {time}",
        "make the {device} go off at {time}", "the {device} should go off at {time}",
    ),
    "turn_off_after": (
        "turn off the {device} in {minutes} minutes", "turn the {device} off in {minutes} minutes",
        "turn the {device} off after {minutes} minutes", "switch off the {device} in {minutes} minutes",
        "switch the {device} off after {minutes} minutes", "{device} off in {minutes} minutes",
        "leave the {device} on for {minutes} minutes", "in {minutes} minutes turn the {device} off",
        "the {device} can go off in {minutes} minutes", "kill the {device} in {minutes} minutes",
        "let the {device} run for another {minutes} minutes then turn it off",
    ),
    "set_brightness": (
        "{device} to {value} percent", "{device} at {value}%", "set the {device} to {value}%",
        "put the {device} at {value} percent", "brightness of the {device} to {value}",
        "set the {device} brightness to {value} percent", "set the {device}'s brightness to {value}",
        "the {device} at {value} percent brightness", "turn the {device} to {value} percent",
        "bring the {device} to {value} percent", "dim the {device} to {value} percent",
        "take the {device} down to {value} percent", "I want {value} percent on the {device}",
        "set the brightness of the {device} to {value}", "{value} percent for the {device}",
    ),
    "brighten": (
        "turn the {device} up by {value}", "make the {device} {value} percent brighter",
        "turn up the {device} by {value} percent", "{value} percent more on the {device}",
        "{device} up by {value} percent", "{device} {value} percent brighter",
        "give me {value} percent more light from the {device}", "raise the {device} by {value} percent",
    ),
    "dim": (
        "turn the {device} down by {value}", "make the {device} {value} percent darker",
        "turn down the {device} by {value} percent", "{value} percent less on the {device}",
        "{device} down by {value} percent", "dim {device} by {value} percent",
        "lower the {device} by {value} percent", "take {value} percent off the {device}",
    ),
    "set_colour": (
        "{device} {value}", "make the {device} {value}", "turn the {device} {value}",
        "{value} for the {device}", "I'd like the {device} in {value}", "set the {device} to {value}",
        "have the {device} glow {value}", "change the {device} to {value}", "{device} to {value}",
        "color the {device} {value}", "set the color of the {device} to {value}", "paint the {device} {value}",
    ),
    "set_warmth": (
        "set the {device} to a warmth of {value} kelvin", "{device} to {value} kelvin",
        "{value} kelvin on the {device}", "set the {device} to {value} K", "white at {value} kelvin on the {device}",
        "set the colour temperature of the {device} to {value}", "make the {device} {value} kelvin",
    ),
    "blink": (
        "make the {device} blink {value} times", "blink the {device} {value} times",
        "flash the {device} {value} times", "let the {device} flash {value} times",
        "have the {device} blink {value} times", "{device}, blink {value} times",
    ),
    "set_temperature": (
        "{device} to {value}", "{device} to {value} degrees", "set the {device} to {value}",
        "heat the {device} to {value} degrees", "heat the {device} to {value}", "put the {device} on {value}",
        "put the {device} at {value} degrees", "turn the {device} to {value}", "make it {value} on the {device}",
        "I want the {device} at {value}", "{value} degrees on the {device}", "bring the {device} to {value} degrees",
        "preheat the {device} to {value} degrees", "get the {device} to {value} degrees",
        "change the {device} to {value} degrees", "set {device} to {value} degrees",
        "turn the {device} up to {value}", "turn the {device} down to {value} degrees",
    ),
    "raise_temperature": (
        "turn the {device} up by {value} degrees", "turn up the {device} by {value}",
        "raise the {device} by {value} degrees", "{device} up by {value} degrees",
        "make it {value} degrees warmer with the {device}", "{device} {value} degrees warmer",
        "{value} degrees more on the {device}", "bump the {device} up {value} degrees",
        "turn the {device} {value} degrees up", "increase the {device} by {value} degrees",
    ),
    "lower_temperature": (
        "turn the {device} down by {value} degrees", "turn down the {device} by {value}",
        "lower the {device} by {value} degrees", "{device} down by {value} degrees",
        "make it {value} degrees cooler with the {device}", "{device} {value} degrees cooler",
        "{value} degrees less on the {device}", "drop the {device} {value} degrees",
        "turn the {device} {value} degrees down", "decrease the {device} by {value} degrees",
    ),
    "set_mode": (
        "put the {device} in {value} mode", "{device} in {value} mode", "{device} to {value}",
        "set the {device} to {value} mode", "switch the {device} to {value}", "run the {device} on {value}",
        "put the {device} on {value}", "{value} mode for the {device}", "change the {device} to {value} mode",
    ),
    "set_speed": (
        "put the {device} on speed {value}", "set the {device} to speed {value}", "{device} on speed {value}",
        "run the {device} at speed {value}", "{device} to {value}", "set the {device} to level {value}",
        "speed {value} on the {device}", "set the speed of the {device} to {value}", "{device} on {value}",
        "turn the {device} to speed {value}", "put the {device} at level {value}", "make the {device} go at {value}",
    ),
    "set_humidity": (
        "{device} to {value} percent", "set the {device} to {value} percent", "{device} at {value}%",
        "put the {device} on {value} percent", "humidity {value} on the {device}",
        "keep the {device} at {value} percent", "turn the {device} to {value} percent",
    ),
    "open": (
        "{device} open", "open the {device}", "open {device}", "{device} up", "let me have the {device} open",
        "I'd like the {device} open", "pop open the {device}", "the {device} can be opened", "open up the {device}",
        "get the {device} open for me", "let some sun in, open the {device}", "let some air in through the {device}",
        "swing the {device} open", "the {device} needs to be open",
    ),
    "close": (
        "{device} closed", "close the {device}", "shut the {device}", "shut {device}", "{device} down",
        "{device} shut", "I'd like the {device} shut", "keep the {device} closed", "the {device} can be closed",
        "close up the {device}", "pull the {device} closed", "the {device} needs to be closed", "pull the {device} shut",
    ),
    "set_position": (
        "{device} to {value} percent", "set the {device} to {value} percent", "{device} at {value}%",
        "put the {device} to {value} percent", "open the {device} to {value}%", "{device} {value} percent open",
        "move the {device} to {value} percent", "leave the {device} {value} percent open", "set {device} at {value} percent",
    ),
    "lock": (
        "lock the {device}", "lock {device}", "{device} locked", "lock up the {device}", "make the {device} secure",
        "I'd like the {device} locked", "get the {device} locked up", "the {device} must be locked",
        "check that the {device} is locked", "the {device} needs locking", "shut and lock the {device}",
    ),
    "unlock": (
        "unlock the {device}", "unlock {device}", "{device} unlocked", "I'd like the {device} unlocked",
        "let them in through the {device}", "the {device} needs unlocking", "undo the lock on the {device}",
        "leave the {device} unlocked", "unlock the {device} for {person}",
    ),
    "start_program": (
        "start the {value} program on the {device}", "{device} on {value}", "run the {value} program on the {device}",
        "run {value} on the {device}", "put the {device} on {value}", "{value} wash on the {device}",
        "start the {value} cycle on the {device}", "run a {value} cycle in the {device}", "set the {device} to {value}",
        "get the {device} going on {value}", "{device}, {value} program",
    ),
    "cook": (
        "cook the {dish} in the {device} for {minutes} minutes", "bake the {dish} in the {device} for {minutes} minutes",
        "{dish} in the {device} for {minutes} minutes", "put the {dish} in the {device} for {minutes} minutes",
        "{minutes} minutes of {dish} in the {device}", "make {dish} in the {device}, {minutes} minutes",
        "let the {dish} cook for {minutes} minutes in the {device}",
    ),
    "water": (
        "water with the {device} for {minutes} minutes", "run the {device} for {minutes} minutes",
        "{device} on for {minutes} minutes", "water the {device} for {minutes} minutes", "{minutes} minutes of water from the {device}",
        "let the {device} run for {minutes} minutes", "give the {device} {minutes} minutes", "start the {device} for {minutes} minutes",
    ),
    "snapshot": (
        "take a snapshot with the {device}", "take a picture with the {device}", "take a photo with the {device}",
        "snap a photo with the {device}", "a picture from the {device}, please", "show me a still from the {device}",
        "grab a picture from the {device}", "photo from the {device}", "get me a shot from the {device}",
        "take a snapshot of the {device}", "snapshot on the {device}", "what can the {device} see? take a picture",
    ),
    "record": (
        "record {minutes} minutes with the {device}", "record with the {device} for {minutes} minutes",
        "record {minutes} minutes of video with the {device}", "film {minutes} minutes with the {device}",
        "have the {device} record {minutes} minutes", "{minutes} minutes of video from the {device}",
        "let the {device} film for {minutes} minutes", "start recording on the {device} for {minutes} minutes",
    ),
    "set_volume": (
        "set the {device} volume to {value}", "{device} volume to {value}", "{device} volume {value}", "{device} to volume {value}",
        "set the volume on the {device} to {value}", "put the {device} volume on {value}", "turn the {device} to {value}",
        "set the volume of the {device} to {value} percent", "volume at {value} on the {device}", "I want the {device} at {value} percent volume",
    ),
    "volume_up": (
        "turn the {device} up by {value}", "{device} up by {value}", "{device} louder by {value}", "turn the {device} up {value}",
        "make the {device} louder by {value}", "turn the {device} volume up by {value}", "{value} louder on the {device}",
    ),
    "volume_down": (
        "turn the {device} down by {value}", "{device} down by {value}", "{device} quieter by {value}", "turn the {device} down {value}",
        "make the {device} quieter by {value}", "turn the {device} volume down by {value}", "{value} quieter on the {device}",
    ),
    "mute": ("mute the {device}", "{device} on mute", "mute {device}", "no sound on the {device}", "sound off on the {device}",
             "I want the {device} muted", "make the {device} shut up", "the {device} should be silent"),
    "unmute": ("unmute the {device}", "unmute {device}", "sound on for the {device}", "the {device} can have its sound back",
               "you can unmute the {device}", "take the mute off the {device}", "I want the {device} unmuted"),
    "play": (
        "play {value} on the {device}", "{value} on the {device}", "put {value} on the {device}", "put on some {value} on the {device}",
        "play some {value} on the {device}", "let's have {value} on the {device}", "start {value} on the {device}",
        "I'd like some {value} on the {device}", "let the {device} play {value}", "give me {value} on the {device}",
    ),
    "pause": ("pause the {device}", "hold the {device}", "stop the music on the {device}", "pause {device}", "pause the music on the {device}",
              "{device} on pause", "pause what's on the {device}", "stop playing on the {device}"),
    "resume": ("resume the {device}", "go on with the {device}", "resume the music on the {device}", "carry on with the {device}",
               "continue on the {device}", "let the {device} play on", "unpause the {device}", "keep the {device} going"),
    "next": ("next song on the {device}", "skip the song on the {device}", "skip on the {device}", "next on the {device}",
             "next track on the {device}", "skip ahead on the {device}", "{device}, next song"),
    "set_channel": ("change the {device} to channel {value}", "channel {value} on the {device}", "{device} to channel {value}",
                    "put channel {value} on the {device}", "put the {device} on channel {value}", "switch the {device} to {value}",
                    "go to channel {value} on the {device}", "I want to watch channel {value} on the {device}"),
    "set_input": ("switch the {device} to {value}", "change the input of the {device} to {value}", "{device} to {value}",
                  "set the {device} input to {value}", "input {value} on the {device}", "switch the {device}'s input to {value}",
                  "put the {device} on {value}", "use {value} on the {device}", "change the {device}'s input to {value}"),
    "go": ("{device}, go to the {room}", "send the {device} to the {room}", "{device} to the {room}", "{device}, come to the {room}",
           "get the {device} over to the {room}", "I need the {device} in the {room}", "{device}, drive to the {room}",
           "move the {device} to the {room}", "{device}, move to the {room}", "have the {device} come to the {room}"),
    "clean": ("have the {device} clean the {room}", "send the {device} to clean the {room}", "clean the {room} with the {device}",
              "let the {device} do the {room}", "{device}, clean the {room}", "the {device} should do the {room}", "get the {device} to clean the {room}",
              "vacuum the {room} with the {device}", "send the {device} through the {room}", "{device}: the {room}, please",
              "could the {device} clean the {room}?", "can the {device} do the {room}?", "the {room} needs the {device}",
              "have the {device} go over the {room}", "run the {device} in the {room}"),
    "dock": ("send the {device} home", "send the {device} back to its dock", "{device}, back to your dock", "dock the {device}",
             "the {device} can go home", "put the {device} back on its dock", "{device}, go home", "send the {device} to its base",
             "return the {device} to its station", "the {device} can go back and charge", "the {device} is done, send it back"),
    "stop": ("stop the {device}", "{device}, stop", "{device} stop", "halt the {device}", "{device}, halt", "{device}, stay where you are",
             "make the {device} stop", "hold it, {device}", "freeze, {device}", "stop right there, {device}"),
    "follow": ("have the {device} follow {person}", "tell the {device} to follow {person}", "{device}, follow {person}", "{device}, go with {person}",
               "the {device} should go with {person}", "send the {device} after {person}", "let the {device} walk behind {person}"),
    "move_forward": ("{device}, move forward {cm} centimetres", "{device}, go forward {cm} centimeters", "{device} forward {cm} cm", "move the {device} forward {cm} cm",
                     "{device}, come forward by {cm} centimetres", "{device}, drive {cm} centimetres forward", "the {device} {cm} cm ahead", "{device}, {cm} centimeters forward"),
    "move_back": ("{device}, move back {cm} centimetres", "{device}, go back {cm} centimeters", "{device} back {cm} cm", "move the {device} back {cm} cm", "{device}, back up {cm} centimetres",
                  "{device}, drive {cm} centimetres backwards", "the {device} {cm} cm back", "{device}, reverse {cm} cm"),
    "turn_left": ("{device}, turn left {degrees} degrees", "turn the {device} left by {degrees} degrees", "{device} {degrees} degrees left", "ask the {device} to turn {degrees} degrees to the left",
                  "{device}, turn {degrees} degrees to the left", "{device}, {degrees} degrees to the left", "{device}, turn left by {degrees} degrees"),
    "turn_right": ("{device}, turn right {degrees} degrees", "turn the {device} right by {degrees} degrees", "{device} {degrees} degrees right", "ask the {device} to turn {degrees} degrees to the right",
                   "{device}, rotate {degrees} degrees right", "{device}, {degrees} degrees to the right", "{device}, turn right by {degrees} degrees"),
    "pick": ("{device}, pick up the {item}", "{device}, take the {item}", "{device}, grab the {item}", "have the {device} take the {item}", "{device}, get the {item}",
             "the {device} should pick up the {item}", "tell the {device} to grab the {item}"),
    "place": ("{device}, put it on the {surface}", "{device}, place it on the {surface}", "have the {device} put what it has on the {surface}", "{device}, set it down on the {surface}",
              "{device}, put that on the {surface}", "{device}, put down what you carry on the {surface}", "tell the {device} to leave what it has on the {surface}", "{device}, place what you have on the {surface}"),
    "gesture": ("{device}, {value}", "{device}, please {value}", "can you make the {device} {value}?", "{device}, {value} for us", "let me see the {device} {value}"),
    "say": ("{device}, say {text}", "make the {device} say {text}", "have the {device} say {text}", "{device}, say: {text}", "tell the {device} to say {text}",
            "let the {device} say {text}", 'have the {device} say "{text}"', "the {device} should say {text}", "{device}, tell them {text}"),
    "fetch": ("{device}, bring the {item} from the {from} to the {to}", "{device}, fetch the {item} from the {from} to the {to}", "have the {device} fetch the {item} from the {from} to the {to}",
              "the {device} should get the {item} from the {from} and bring it to the {to}", "{device}, get the {item} out of the {from} and take it to the {to}",
              "have the {device} get the {item} from the {from} to the {to}", "fetch the {item} from the {from} to the {to} with the {device}"),
    "patrol": ("{device}, patrol the {first}, the {second} and the {third}", "{device}, patrol the {first}, then the {second}, then the {third}", "{device}, check the {first}, the {second} and the {third}",
               "have the {device} go round the {first}, {second} and {third}", "let the {device} patrol the {first}, then the {second}, then the {third}", "patrol the {first}, the {second} and the {third} with the {device}"),
    "tidy": ("{device}, put the {item} on the {surface} in the {room}", "{device}, tidy the {item} onto the {surface} in the {room}", "have the {device} tidy the {item} away onto the {surface} in the {room}",
             "{device}, take the {item} to the {surface} in the {room}", "{device}, tidy up the {item}: {surface} in the {room}", "let the {device} tidy the {item} away on the {surface} in the {room}"),
}  # fmt: skip
MORE: Final = {
    name: tuple(text for text in texts if "{person}" not in text or name == "follow")
    for name, texts in _ALL.items()
}

SPECIAL: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "timer": {"set_timer": (
        "set the {device} for {minutes} minutes", "set the timer to {minutes} minutes", "set the {device} to {minutes} minutes",
        "start the timer for {minutes} minutes", "{minutes} minutes on the {device}", "timer for {minutes} minutes", "timer {minutes} minutes",
        "put {minutes} minutes on the timer", "start the {device}, {minutes} minutes", "I need a timer for {minutes} minutes", "time {minutes} minutes",
        "give me a timer of {minutes} minutes", "count {minutes} minutes for me", "{device}: {minutes} minutes",
    )},
    "clock": {"set_alarm": (
        "set the {device} for {time}", "set the {device} to {time}", "wake me at {time}", "wake me up at {time}", "alarm at {time}", "I have to be up at {time}",
        "I need to get up at {time}", "set an alarm for {time}", "put the {device} on {time}", "get me up at {time}", "{device} at {time}", "ring at {time}",
    )},
    "list": {"add_item": (
        "add {item} to the {device}", "put {item} on the {device}", "add {item} to the list", "put {item} on the list", "we need {item}", "we're out of {item}",
        "write {item} on the {device}", "{item} on the {device}", "note {item} on the {device}", "I have to buy {item}", "we've run out of {item}", "don't let me forget to buy {item}",
        "put {item} down on the list", "get {item} on the {device}", "add some {item} to the {device}", "we're nearly out of {item}",
    )},
    "phone": {
        "send_message": (
            "send {person} a message saying {text}", "send {person} a message: {text}", "text {person} that {text}", "text {person}: {text}", "tell {person} that {text}",
            "message {person}: {text}", "write {person} that {text}", "let {person} know that {text}", "send a message to {person}: {text}", "send {person} a text saying {text}",
            "use the {device} to tell {person} that {text}", "send a text to {person} saying {text}", 'text {person} "{text}"', "message {person} saying {text}",
        ),
        "call": (
            "call {person}", "ring {person}", "phone {person}", "give {person} a call", "give {person} a ring", "I want to talk to {person}", "call {person} on the {device}",
            "get me {person} on the phone", "can you call {person}?", "I need to speak to {person}", "make a call to {person}", "try {person} on the {device}",
        ),
    },
    "calendar": {"remind": (
        "remind me to {task} at {time}", "put a reminder in the {device} to {task} at {time}", "at {time} remind me to {task}", "add a reminder at {time} to {task}",
        "make a note in the {device} to {task} at {time}", "I have to {task} at {time}, remind me", "put {task} at {time} in the {device}", "don't let me forget to {task} at {time}",
        "note in the {device}: {task} at {time}", "set a reminder for {time} to {task}", "remind me at {time} that I have to {task}",
    )},
}  # fmt: skip

_VERBS: Final = (
    "water",
    "clean",
    "fix",
    "call",
    "feed",
    "buy",
    "pay",
    "wash",
    "check",
    "order",
    "bring",
    "find",
    "sell",
    "move",
    "return",
    "paint",
    "book",
)
_THINGS: Final = (
    "bills",
    "plants",
    "windows",
    "bike",
    "cat",
    "dog",
    "car",
    "oven",
    "tax form",
    "tickets",
    "curtains",
    "shoes",
    "books",
    "garden",
    "bank",
    "school",
    "plumber",
    "rent",
    "fish",
)
_SAYINGS: Final = (
    "dinner is served", "I'll be late", "good night", "welcome home", "hello everybody", "see you soon", "come home", "lunch is ready", "I miss you", "happy birthday",
    "time to go", "where are you", "the film starts at eight", "bring some milk", "I'm at the station", "good luck", "thank you", "well done", "I love you", "the train is late",
    "please hurry", "the shop is closed", "we are waiting", "breakfast is on the table", "it's your turn", "good evening", "the taxi is here", "be careful", "I have landed",
    "the keys are in the {item}", "the {item} has arrived", "the {dish} is in the oven", "I'm bringing {dish}", "call {person} back", "{person} says hello", "we need {grocery}",
)  # fmt: skip
_INPUTS: Final = (
    "HDMI 1",
    "HDMI 2",
    "HDMI 3",
    "HDMI 4",
    "AV",
    "USB",
    "DVD",
    "Bluetooth",
    "game console",
    "streaming",
    "the antenna",
    "satellite",
    "PC",
    "cable",
)
_COLOURS: Final = (
    "red",
    "green",
    "blue",
    "yellow",
    "orange",
    "purple",
    "pink",
    "white",
    "turquoise",
    "warm white",
    "cold white",
    "lilac",
    "magenta",
    "gold",
    "navy",
    "lavender",
    "crimson",
    "cream",
    "sky blue",
    "dark red",
    "light green",
)
_MODES: Final = (
    "dry",
    "cool",
    "heat",
    "auto",
    "fan",
    "eco",
    "sleep",
    "silent",
    "turbo",
    "party",
    "away",
    "night",
    "comfort",
    "holiday",
    "frost",
    "manual",
    "boost",
    "quiet",
    "day",
)
_PROGRAMS: Final = (
    "cotton",
    "eco",
    "quick",
    "wool",
    "delicate",
    "silk",
    "spin",
    "rinse",
    "express",
    "intensive",
    "mixed",
    "dark",
    "baby",
    "glass",
    "daily",
    "short",
    "sports",
    "jeans",
    "hygiene",
    "pots",
    "towels",
    "shirts",
)
_STYLES: Final = (
    *MUSIC,
    "classical",
    "Mozart",
    "the Beatles",
    "a love song",
    "dance",
    "metal",
    "punk",
    "my playlist",
    "something calm",
    "ocean sounds",
    "an audiobook",
    "the sports news",
    "radio one",
    "lullabies",
    "Christmas songs",
    "hits of the eighties",
)
_SPEEDS: Final = (
    "1",
    "2",
    "3",
    "4",
    "5",
    "low",
    "high",
    "medium",
    "full",
    "minimum",
    "maximum",
    "slow",
    "fast",
    "half",
    "6",
    "10",
    "max",
    "turbo",
)
_GESTURES: Final = (
    "wave",
    "nod",
    "bow",
    "dance",
    "spin",
    "clap",
    "jump",
    "sit",
    "beep",
    "smile",
    "blink",
    "salute",
    "stretch",
    "shake hands",
    "sing",
    "laugh",
)
_SURFACES: Final = (
    "table",
    "shelf",
    "desk",
    "counter",
    "sofa",
    "bed",
    "chair",
    "bench",
    "tray",
    "floor",
    "window sill",
    "sideboard",
    "dresser",
    "rug",
    "stool",
    "bookcase",
    "coffee table",
    "nightstand",
    "worktop",
    "rack",
    "cabinet",
    "mat",
    "piano",
    "box",
)


def _from(words: tuple[str, ...], made_up: float = 0.0) -> Callable[[Random], str]:
    return lambda rng: compose_word(rng) if likely(rng, made_up) else rng.choice(words)


def _numbers(low: int, high: int, step: int = 1) -> Callable[[Random], str]:
    return lambda rng: str(rng.randrange(low, high + 1, step))


def _item(rng: Random) -> str:
    thing = compose_word(rng) if likely(rng, 0.3) else rng.choice(ITEMS)
    adjective = (
        "red",
        "blue",
        "small",
        "old",
        "big",
        "green",
        "black",
        "white",
        "empty",
        "new",
        "wet",
        "yellow",
    )
    return f"{rng.choice(adjective)} {thing.split()[-1]}" if likely(rng, 0.4) else thing


def _task(rng: Random) -> str:
    if likely(rng, 0.15):
        return f"call {somebody(rng)}"
    thing = compose_word(rng) if likely(rng, 0.2) else rng.choice(_THINGS)
    return f"{rng.choice(_VERBS)} the {thing}"


def _grocery(rng: Random) -> str:
    word = compose_word(rng) if likely(rng, 0.3) else rng.choice(GROCERIES)
    return (
        f"{rng.choice(('brown', 'fresh', 'frozen', 'green', 'cat', 'dog', 'white', 'baby', 'dark'))} {word}"
        if likely(rng, 0.2)
        else word
    )


def _dish(rng: Random) -> str:
    word = (
        compose_word(rng)
        if likely(rng, 0.2)
        else rng.choice(
            (
                *DISHES,
                "chicken",
                "turkey",
                "gratin",
                "muffins",
                "casserole",
                "beef",
                "rolls",
                "quiche",
                "tart",
                "fries",
                "salmon",
            )
        )
    )
    return (
        f"{rng.choice(('apple', 'frozen', 'sweet', 'fish', 'cheese', 'roast'))} {word}"
        if likely(rng, 0.15)
        else word
    )


VALUES: Final[dict[tuple[str, str], Callable[[Random], str]]] = {
    ("", "room"): _from(PLACES, 0.1),
    ("", "person"): somebody,
    ("", "item"): _item,
    ("add_item", "item"): _grocery,
    ("", "task"): _task,
    ("", "text"): lambda rng: clause(rng, _SAYINGS),
    ("", "dish"): _dish,
    ("set_input", "value"): _from(_INPUTS),
    ("set_colour", "value"): _from(_COLOURS),
    ("set_mode", "value"): _from(_MODES),
    ("start_program", "value"): _from(_PROGRAMS, 0.1),
    ("play", "value"): _from(_STYLES, 0.15),
    ("set_speed", "value"): _from(_SPEEDS),
    ("gesture", "value"): _from(_GESTURES),
    ("", "surface"): _from(_SURFACES, 0.05),
    ("set_volume", "value"): _numbers(0, 100, 5),
    ("", "minutes"): lambda rng: rng.choice(("30", "60", "15", "5", "10", "20", "45", "90", "2", "3", "120")),
    ("set_brightness", "value"): _numbers(5, 100, 5),
    ("set_position", "value"): _numbers(5, 95, 5),
}  # fmt: skip

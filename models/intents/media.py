"""Sound and picture."""

from models.domain import Intent
from models.pools import number, of_kind, one_of
from models.replies import action
from models.vocabulary import INPUTS, MUSIC

_SOUND = ("device", of_kind("speaker", "tv"))
_SPEAKER = ("device", of_kind("speaker"))
_TV = ("device", of_kind("tv"))

INTENTS = (
    Intent("set_volume", "media", (_SOUND, ("value", number(0, 100))), action, (
        "set the volume of the {device} to {value}",
        "put the volume of the {device} at {value}",
        "turn the volume on the {device} to {value}",
        "volume {value} on the {device}",
        "I want the {device} at volume {value}",
    )),
    Intent("volume_up", "media", (_SOUND, ("value", number(1, 30))), action, (
        "turn the volume of the {device} up by {value}",
        "make the {device} louder by {value}",
        "raise the volume of the {device} by {value}",
        "add {value} to the volume of the {device}",
        "volume up by {value} on the {device}",
    )),
    Intent("volume_down", "media", (_SOUND, ("value", number(1, 30))), action, (
        "turn the volume of the {device} down by {value}",
        "make the {device} quieter by {value}",
        "lower the volume of the {device} by {value}",
        "take {value} off the volume of the {device}",
        "volume down by {value} on the {device}",
    )),
    Intent("mute", "media", (_SOUND,), action, (
        "mute the {device}",
        "silence the {device}",
        "no sound from the {device}",
        "cut the sound of the {device}",
        "can you mute the {device}?",
    )),
    Intent("unmute", "media", (_SOUND,), action, (
        "unmute the {device}",
        "bring back the sound of the {device}",
        "sound back on for the {device}",
        "stop muting the {device}",
        "can you unmute the {device}?",
    )),
    Intent("play", "media", (_SPEAKER, ("value", one_of(MUSIC))), action, (
        "play {value} on the {device}",
        "put on {value} on the {device}",
        "start {value} on the {device}",
        "I would like to hear {value} on the {device}",
        "let the {device} play {value}",
    )),
    Intent("pause", "media", (_SOUND,), action, (
        "pause the {device}",
        "hold the {device} for a moment",
        "take a break on the {device}",
        "pause what is on the {device}",
        "can you pause the {device}?",
    )),
    Intent("resume", "media", (_SOUND,), action, (
        "resume the {device}",
        "continue on the {device}",
        "carry on with the {device}",
        "go on playing on the {device}",
        "can you resume the {device}?",
    )),
    Intent("next", "media", (_SOUND,), action, (
        "skip this one on the {device}",
        "next one on the {device}",
        "play the next track on the {device}",
        "go to the next title on the {device}",
        "can you skip ahead on the {device}?",
    )),
    Intent("set_channel", "media", (_TV, ("value", number(1, 99))), action, (
        "set the {device} to channel {value}",
        "change the channel on the {device} to {value}",
        "go to channel {value} on the {device}",
        "show channel {value} on the {device}",
        "tune the {device} to channel {value}",
    )),
    Intent("set_input", "media", (_TV, ("value", one_of(INPUTS))), action, (
        "switch the {device} to {value} input",
        "set the input of the {device} to {value}",
        "use the {value} input on the {device}",
        "show {value} on the {device}",
        "change the source of the {device} to {value}",
    )),
)  # fmt: skip

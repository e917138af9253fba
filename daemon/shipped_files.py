"""Models, adapters and the picture that come with Hearth, by name; a home to show them in."""

import json
import re
from pathlib import Path

EXAMPLE_HOME = """You are Hearth, the assistant of this home.
Devices:
- desk lamp (light, office): off
- ceiling light (light, kitchen): on
- main thermostat (thermostat, hall): set to 19 degrees
- window blind (blind, bedroom): open
- front door (lock, hall): unlocked
- kitchen speaker (speaker, kitchen): paused
- robot vacuum (vacuum, hall): docked"""


_FORM = r"""start: PLAIN | action | "[" (action "," gap)* (action "]" | unlisted) | unlisted
action: head (device DEVICE "\"")? ("," gap KEY ":" gap (TEXT | NUMBER | "true" | "false"))* "}"
unlisted: head device OTHER ("\"" | " ...") " is not in the list"
head: "{\"action\":" gap TEXT
device: "," gap "\"device\":" gap "\""
gap: " "?
PLAIN: /[^{\[ \t\r\n](.|\n)*/
DEVICE: /(<names>)/
OTHER: /((<words>) )?[^ "\\\x00-\x1f]{1,12}/ & ~/(<begun>)/
KEY: /"[a-z_]{1,32}"/ & ~/"(action|device)"/
TEXT: /"([^"\\\x00-\x1f]|\\["\\]){0,64}"/
NUMBER: /-?(0|[1-9][0-9]{0,8})(\.[0-9]{1,4})?/
"""


def home_format(home: str) -> dict[str, str]:
    """Response format in which no action names a device that a system message does not list.

    A device is one line, `- name (kind, room): state`. A reply is text that begins with no bracket,
    an action or a list of actions. Where the model names another device the object stays open, with
    a word of why: to force a listed name there would act on the wrong device.
    """
    listed = re.findall(r"(?m)^- (.+?) \([^()]*\): ", home)
    names = [json.dumps(name, ensure_ascii=False)[1:-1] for name in listed]
    split = [name.split(" ") for name in names]
    parts = {
        "names": names,
        "words": [" ".join(words[:end]) for words in split for end in range(1, len(words) + 1)],
        "begun": [name[:end] for name in names for end in range(1, len(name) + 1)],
    }
    form = _FORM
    for part, texts in parts.items():
        patterns = (re.escape(text).replace("/", r"\/") for text in dict.fromkeys(texts))
        form = form.replace(f"<{part}>", "|".join(patterns))
    return {"type": "lark", "grammar": form}


_ROOT = Path(__file__).parent.parent
MODELS = {name: _ROOT / "models" / name for name in ("home", "home-vision", "home-draft")}
ADAPTERS = {name: _ROOT / "models" / "home-adapters" / name for name in ("spoken", "careful")}
PICTURE = _ROOT / "daemon" / "demo" / "scene.jpg"


def shipped_model(path: Path) -> Path:
    """The shipped model that `path` is the name of, unless a file of that name is there."""
    return path if path.exists() else MODELS.get(str(path), path)


def shipped_picture(path: Path) -> Path:
    """The shipped picture where `path` is its name, unless a file of that name is there."""
    return PICTURE if str(path) == PICTURE.name and not path.exists() else path

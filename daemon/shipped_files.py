"""Models, adapters and the picture that come with Hearth, found by their names; an example home."""

import json
import re
from pathlib import Path
from typing import Any

EXAMPLE_HOME = """You are Hearth, the assistant of this home.
Devices:
- desk lamp (light, office): off
- ceiling light (light, kitchen): on
- main thermostat (thermostat, hall): set to 19 degrees
- window blind (blind, bedroom): open
- front door (lock, hall): unlocked
- kitchen speaker (speaker, kitchen): paused
- robot vacuum (vacuum, hall): docked"""


def home_schema(home: str) -> dict[str, Any]:
    """Return the JSON schema of actions on the devices that a system message lists, and no others.

    An action is an object, several are a list. A device is one line, `- name (kind, room): state`.
    """
    names = re.findall(r"^- (.+?) \([^()]*\): ", home, re.MULTILINE)
    step = {
        "type": "object",
        "properties": {
            "action": {"type": "string"},
            "device": {"type": "string", "enum": names} if names else False,
        },
        "required": ["action"],
        "additionalProperties": {"type": ["string", "integer"]},
    }
    return {"anyOf": [step, {"type": "array", "items": step}]}


def home_format(home: str) -> dict[str, Any]:
    """Return the response format of words or, with a brace or bracket first, of such actions."""
    actions = json.dumps(home_schema(home), ensure_ascii=False)
    words = r"/[^\s\[{](.|\n)*/"
    return {
        "type": "lark",
        "grammar": f"start: words | actions\nwords: {words}\nactions: %json {actions}",
    }


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

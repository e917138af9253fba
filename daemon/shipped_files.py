"""Models, adapters and the picture that come with Hearth, found by their names."""

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

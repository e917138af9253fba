import json
from pathlib import Path

from hearth_ros.prompts import TOPICS
from hearth_ros.requests import SERVICE_TYPES
from hearth_ros.settings import parameters

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_page_has_every_parameter_as_it_is() -> None:
    rows = [
        f"| `{one.name}` | `{json.dumps(one.default)}` | {one.description} |"
        for one in parameters()
    ]
    assert "\n".join(["|---|---|---|", *rows, ""]) in README


def test_the_page_has_topics_and_tools() -> None:
    names = [*(f"| `~/{topic}` | `std_msgs/String` | out: " for topic in TOPICS), *SERVICE_TYPES]
    assert not [name for name in names if name not in README]

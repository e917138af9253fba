import pytest

from hearth.daemon.configuration.settings import SETTINGS
from hearth.daemon.configuration.words import allowed, shown


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("engine", "text"),
        ("verify", "true or false"),
        ("threads", "a whole number from 0 to 1024"),
        ("drain_s", "a number from 0 to 3600"),
        ("hold_s", "a number above 0 to 3600"),
        ("log_format", "one of auto, console, json"),
    ],
)
def test_what_is_allowed(name: str, words: str) -> None:
    assert allowed(SETTINGS[name].type) == words


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_described_in_a_sentence(name: str) -> None:
    assert SETTINGS[name].declared.description.endswith(".")


def test_defaults_are_shown_as_a_file_has_them() -> None:
    assert [shown(value) for value in (True, 8, 2.5, "auto")] == ["true", "8", "2.5", '"auto"']

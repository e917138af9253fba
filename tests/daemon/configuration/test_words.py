import pytest

from daemon.configuration.settings import FIELDS
from daemon.configuration.words import allowed, description, shown


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
    assert allowed(FIELDS[name].type) == words


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_is_described_in_a_sentence(name: str) -> None:
    assert description(FIELDS[name].type).endswith(".")


def test_a_type_without_description_is_a_mistake() -> None:
    with pytest.raises(TypeError):
        description(int)


def test_defaults_are_shown_as_a_file_has_them() -> None:
    assert [shown(value) for value in (True, 8, 2.5, "auto")] == ["true", "8", "2.5", '"auto"']

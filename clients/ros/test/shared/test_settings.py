import pytest

from hearth_client import InvalidValue
from hearth_ros.settings import Settings, parameters, read_settings


def test_every_parameter_says_what_it_is() -> None:
    found = list(parameters())
    assert [one.name for one in found] == list(Settings.__struct_fields__)
    assert all(one.description.endswith(".") for one in found)
    assert read_settings(lambda _, default: default) == Settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", -1), ("interrupt", "yes"), ("tool_timeout_s", 0.0), ("queue", 2.5)],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidValue, match=f"parameter {name} cannot be") as caught:
        read_settings(lambda asked, default: value if asked == name else default)
    assert caught.value.field == name


def test_a_whole_number_serves_where_seconds_are_asked() -> None:
    settings = read_settings(lambda name, default: 3 if name == "tool_timeout_s" else default)
    assert settings.tool_timeout_s == 3

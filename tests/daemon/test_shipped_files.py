import pytest
from llguidance import LLMatcher, LLTokenizer

from hearth.daemon.shipped_files import EXAMPLE_HOME, home_format
from hearth.runtime.grammar import lark_grammar, try_grammar

BYTES = LLTokenizer("byte")
HOME = 'Devices:\n- lamp "A/1" (light, hall): off\n- front door (lock, hall): unlocked'


def follows(text: str, home: str = EXAMPLE_HOME) -> bool:
    matcher = LLMatcher(BYTES, home_format(home)["grammar"], log_level=0)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_the_form_of_the_example_is_one_that_a_daemon_takes() -> None:
    try_grammar(lark_grammar(home_format(EXAMPLE_HOME)["grammar"], "response_format.grammar"))


def test_a_home_without_a_list_has_no_device_to_act_on() -> None:
    assert follows('{"action":"set_timer","minutes":5}', "You are Hearth.")
    assert not follows('{"action":"turn_on","device":"desk lamp"}', "You are Hearth.")
    assert follows("There is no desk lamp.", "You are Hearth.")


@pytest.mark.parametrize(
    "text",
    [
        "I cannot find the garage here.",
        "Two lines,\n\n{and} [more].",
        '{"action":"turn_on","device":"desk lamp"}',
        '{"action": "dim", "device": "desk lamp", "value": 20.5, "slow": true}',
        '[{"action":"close","device":"window blind"},{"action":"call","person":"Jos\\"é"}]',
    ],
)
def test_answers_and_actions_on_home_format_follow_it(text: str) -> None:
    assert follows(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ' {"action":"unlock","device":"garage"}',
        '{"action":"unlock","device":"garage"}',
        '{"action":"unlock","device":"front"}',
        '{"action":"unlock","device":"front door","device":"garage"}',
        '{"action":"unlock","room":"hall","device":"garage"}',
        '{"action":"unlock","d\\u0065vice":"garage"}',
        '{"action":"unlock","device":["garage"]}',
        '[{"action":"lock","device":"front door"},{"action":"unlock","device":"garage"}]',
        '[{"action":"unlock","device":"garage ... is not in the list]',
        '{"action":"unlock","device":"front door" is not in the list',
        '{"action":"unlock","device":"front ... is not in the list',
    ],
)
def test_no_action_names_another_device(text: str) -> None:
    assert not follows(text)


@pytest.mark.parametrize("name", ["garage ...", 'garage"', "front gate ...", 'front doorbell"'])
@pytest.mark.parametrize("before", ["", "[", '[{"action":"lock","device":"front door"},'])
def test_an_action_on_another_device_stays_open(name: str, before: str) -> None:
    assert follows(f'{before}{{"action":"unlock","device":"{name} is not in the list')


def test_names_are_spelled_as_json_has_them() -> None:
    assert follows('{"action":"turn_on","device":"lamp \\"A/1\\""}', HOME)
    assert not follows('{"action":"turn_on","device":"lamp \\"A/2\\""}', HOME)
    home = "- Zoë's {2} lamp* (light, hall): off"
    assert follows('{"action":"turn_on","device":"Zoë\'s {2} lamp*"}', home)
    assert not follows('{"action":"turn_on","device":"Zoë\'s {2} lampp"}', home)

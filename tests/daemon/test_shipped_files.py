import json
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer

from hearth.daemon.shipped_files import EXAMPLE_HOME, MODELS, home_format, home_schema
from hearth.runtime.errors import HearthError
from hearth.runtime.grammar import GrammarCompiler

TOKENIZER = MODELS["home"] / "tokenizer.json"
END = 2


@pytest.fixture
def grammars() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(TOKENIZER, 1024, (END,))
    yield made
    made.close()


def follows(grammars: GrammarCompiler, home: str, reply: str) -> bool:
    """Tell whether a reply has the format of the home."""
    ids = Tokenizer.from_file(str(TOKENIZER)).encode(reply).ids
    try:
        grammars.matcher(home_format(home)["grammar"], ids).accept(END)
    except HearthError:
        return False
    return True


def test_the_schema_has_the_names_of_the_list() -> None:
    step, several = home_schema(EXAMPLE_HOME)["anyOf"]
    assert several["items"] == step
    assert step["properties"]["device"]["enum"] == [
        "desk lamp",
        "ceiling light",
        "main thermostat",
        "window blind",
        "front door",
        "kitchen speaker",
        "robot vacuum",
    ]


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ('{"action":"turn_on","device":"desk lamp"}', True),
        ('{"action":"dim","device":"desk lamp","value":20}', True),
        ('{"action":"go","device":"robot vacuum","room":"hall"}', True),
        ('{"action":"set_timer","minutes":5}', True),
        ('[{"action":"lock","device":"front door"},{"action":"add_item","item":"milk"}]', True),
        ("I cannot find the garden lamp here.", True),
        ("Which one: desk lamp or ceiling light?", True),
        ('{"action":"turn_on","device":"garden lamp"}', False),
        ('{"action":"turn_on","device":"desk"}', False),
        ('[{"action":"lock","device":"front door"},{"action":"lock","device":"back door"}]', False),
        ('{"device":"desk lamp"}', False),
        (' {"action":"turn_on","device":"garden lamp"}', False),
        ("", False),
    ],
)
def test_a_device_that_is_not_listed_is_never_acted_on(
    grammars: GrammarCompiler, reply: str, *, right: bool
) -> None:
    assert follows(grammars, EXAMPLE_HOME, reply) is right


def test_a_home_without_a_list_has_no_device_to_act_on(grammars: GrammarCompiler) -> None:
    home = "You are Hearth."
    assert follows(grammars, home, '{"action":"set_timer","minutes":5}')
    assert not follows(grammars, home, '{"action":"turn_on","device":"desk lamp"}')


def test_names_are_text_and_no_part_of_the_grammar(grammars: GrammarCompiler) -> None:
    name = 'Zoë\'s "big" lamp / {2}'
    home = f"Devices:\n- {name} (light, study): off"
    action = json.dumps({"action": "turn_on", "device": name}, ensure_ascii=False)
    assert follows(grammars, home, action)
    assert not follows(grammars, home, action.replace("big", "old"))

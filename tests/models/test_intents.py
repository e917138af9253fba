from models.homes import KINDS
from models.intents import INTENTS
from models.names import SEEN, UNSEEN, UNSEEN_WORDS
from models.vocabulary import PLURALS


def test_at_least_forty_intents_with_five_phrasings_each() -> None:
    assert len(INTENTS) >= 40
    assert all(len(set(intent.phrasings)) >= 5 for intent in INTENTS)


def test_names_of_intents_are_distinct() -> None:
    assert len({intent.name for intent in INTENTS}) == len(INTENTS)


def test_at_least_two_hundred_seen_names_all_distinct() -> None:
    names = [name for group in SEEN.values() for name in group]
    assert len(names) >= 200
    assert len(set(names)) == len(names)


def test_every_kind_has_seen_and_unseen_names_and_a_plural() -> None:
    assert tuple(SEEN) == tuple(UNSEEN) == KINDS == tuple(PLURALS)


def test_every_unseen_name_has_an_unseen_word() -> None:
    names = [name for group in UNSEEN.values() for name in group]
    assert all(UNSEEN_WORDS & set(name.split()) for name in names)


def test_every_slot_of_a_phrasing_is_filled() -> None:
    for intent in INTENTS:
        slots = {key: "x" for key, _ in intent.slots}
        assert all(phrasing.format(**slots) for phrasing in intent.phrasings)

import pytest
import tokenizers
from tokenizers import models

from hearth.runtime.errors import HearthError
from hearth.runtime.text.tokenizer import SpecialTokens
from tests.runtime.text.folders import byte_level, word_level


def special_tokens(library: tokenizers.Tokenizer, unknown: int | None = None) -> SpecialTokens:
    return SpecialTokens(library, library.get_vocab_size(), unknown)


def encode(library: tokenizers.Tokenizer, text: str) -> list[int]:
    library.encode_special_tokens = True
    return library.encode(text, add_special_tokens=False).ids


def test_the_template_s_tokens_become_ids_and_the_user_s_stay_text() -> None:
    library = byte_level()
    special = special_tokens(library)
    cloak = special.escape()
    rendered = "<|im_start|>user\n" + cloak.hide("a<|im_start|>b") + "<|im_end|>"
    ids = special.real_ids(encode(library, special.spell(rendered, cloak, torn=False)))
    assert ids is not None
    assert [i for i in ids if i in special.ids] == [1, 2]
    assert library.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>user\na<|im_start|>b<|im_end|>"
    )


def test_text_that_became_special_is_noticed_and_torn() -> None:
    library = word_level()
    special = special_tokens(library, unknown=0)
    cloak = special.escape()
    rendered = "<sys> " + cloak.hide("turn <sys> on")
    whole = encode(library, special.spell(rendered, cloak, torn=False))
    assert special.real_ids(whole) is None
    torn = encode(library, special.spell(rendered, cloak, torn=True))
    assert special.real_ids(torn) == [1, 3, 0, 5, 4]


def test_white_space_rules_are_kept() -> None:
    library = byte_level()
    library.add_special_tokens([tokenizers.AddedToken("<eat>", lstrip=True, rstrip=True)])
    library.encode_special_tokens = False
    plain = library.encode("a <eat> b").ids
    special = special_tokens(library)
    spelled = special.spell("a <eat> b", special.escape(), torn=False)
    assert special.real_ids(encode(library, spelled)) == plain


def test_single_words_are_special_between_other_characters_alone() -> None:
    library = byte_level()
    library.add_special_tokens([tokenizers.AddedToken("stop", single_word=True)])
    special = special_tokens(library)
    text = "stop unstoppable stop."
    library.encode_special_tokens = False
    plain = library.encode(text).ids
    spelled = special.spell(text, special.escape(), torn=False)
    assert special.real_ids(encode(library, spelled)) == plain


def test_a_tokenizer_without_special_tokens_is_served() -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))  # noqa: S106 - no password
    special = special_tokens(library)
    spelled = special.spell("<s>", special.escape(), torn=False)
    assert (spelled, special.ids) == ("<s>", frozenset())


def test_gaps_in_the_ids_are_refused() -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 5}, unk_token="a"))  # noqa: S106 - no password
    with pytest.raises(HearthError) as caught:
        SpecialTokens(library, 6, None)
    assert (caught.value.code, caught.value.field) == ("engine_corrupt", "tokenizer.json")

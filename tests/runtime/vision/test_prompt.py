import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.images import Picture
from hearth.runtime.text import Tokenizer
from hearth.runtime.text.chat_template import ChatTemplate
from hearth.runtime.text.tokenizer import TokenizerFile
from hearth.runtime.vision.prompt import VisionInput, encode_turns
from tests.runtime.image_processing.photographs import config_like
from tests.vision_models import FAMILIES, VOCABULARY, Family, make_tokenizer
from tests.vision_processors import TEMPLATES

IMAGE = VisionInput([Picture("rgb8", 64, 32, 192)])
VIDEO = VisionInput([Picture("jpeg", 64, 32)] * 4, [0.0, 0.5, 1.0, 1.5])
SHOWS_NO_TEXT = (
    "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
)


def tokenizer_of(family: Family, template: str = "") -> Tokenizer:
    library = make_tokenizer(family)
    file = TokenizerFile(library, library.get_vocab_size(), None)
    return Tokenizer(file, ChatTemplate(template or TEMPLATES[family], {}), VOCABULARY)


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_go_where_the_parts_stand_and_text_spells_no_place(family: Family) -> None:
    config, tokenizer = config_like(family), tokenizer_of(family)
    spelt = "see <image> <|image_pad|> <|video_pad|>"
    parts = [{"type": "image"}, {"type": "text", "text": spelt}, {"type": "video"}]
    vision_inputs = [IMAGE, VIDEO]
    layouts = [one.layout(config) for one in vision_inputs]
    ids, spans = encode_turns(
        tokenizer, [("system", "be brief"), ("user", parts)], vision_inputs, layouts, config
    )
    assert [sum(span.length for span in one) for one in spans] == [one.tokens for one in layouts]
    places = {
        at for one in spans for span in one for at in range(span.start, span.start + span.length)
    }
    tokens = {config.tokens.image, config.tokens.video}
    assert places == {at for at, number in enumerate(ids) if number in tokens}
    text = tokenizer.decode(ids)
    assert "be brief" in text
    assert spelt in text
    assert max(span.start for span in spans[0]) < min(span.start for span in spans[1])


def test_a_cap_makes_the_layout_smaller() -> None:
    config = config_like("qwen3_vl")
    whole = IMAGE.layout(config).tokens
    assert IMAGE.layout(config, whole - 1).tokens < whole
    assert VIDEO.layout(config, 2).tokens == 2


def test_pictures_that_the_template_does_not_show_are_refused() -> None:
    config, tokenizer = config_like("qwen3_vl"), tokenizer_of("qwen3_vl", SHOWS_NO_TEXT)
    turns = [("user", [{"type": "image"}, {"type": "text", "text": "see"}])]
    with pytest.raises(HearthError) as caught:
        encode_turns(tokenizer, turns, [IMAGE], [IMAGE.layout(config)], config)
    assert (caught.value.code, caught.value.field) == ("invalid_value", "messages")


def test_a_template_that_shows_parts_alone_gets_text_as_a_part() -> None:
    tokenizer = tokenizer_of("idefics3", SHOWS_NO_TEXT)
    ids = tokenizer.encode_chat([("system", "be"), ("user", "<image> brief")])
    assert tokenizer.decode(ids) == "be<image> brief"
    assert config_like("idefics3").tokens.image not in ids


def test_a_piece_of_a_prompt_has_special_tokens_and_none_around_it() -> None:
    tokenizer = tokenizer_of("qwen3_vl")
    assert tokenizer.encode_piece("<|image_pad|>") == [config_like("qwen3_vl").tokens.image]

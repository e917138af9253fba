"""Towers and prompts, and embeddings beside the processors and towers of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image as PilImage

from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.export.options import Dialect, ExportOptions
from hearth.runtime.export.vision.write import write_vision
from hearth.runtime.image_processing.decoding import patch
from hearth.runtime.image_processing.sizes import layout_of
from hearth.runtime.images import ImageLayout, Picture
from hearth.runtime.text.chat_template import ChatTemplate
from hearth.runtime.text.conversation import Conversation, Turn, TurnPart
from hearth.runtime.text.tokenizer import Tokenizer, TokenizerFile
from hearth.runtime.vision.prompt import VisionInput, encode_conversation
from hearth.runtime.vision.vision_runner import VisionRunner
from hearth.runtime.vision_config import VISION_FOLDER, VisionConfig
from tests.runtime.image_processing.photographs import config_like, draw, photo
from tests.runtime.vision.tower_config import config_of, expected, fake_runner
from tests.vision_models import FAMILIES, VOCABULARY, Family, make_tokenizer, write_vision_model
from tests.vision_processors import TEMPLATES

Image = tuple[NDArray[np.uint8], ImageLayout]
CONFIG = config_of(
    "qwen3_vl",
    deepstack_layers=(0, 1),
    position_side=4,
    patch_size=2,
    max_patches=48,
    hidden_size=16,
)
TILES = config_of(
    "idefics3",
    position_side=4,
    patch_size=2,
    temporal_patch_size=1,
    max_patches=40,
    hidden_size=16,
)


def image(config: VisionConfig, *grid: int, segments: int = 1) -> Image:
    time, height, width = grid
    patches = segments * time * height * width
    layout = ImageLayout(
        height=0, width=0, grid=(time, height, width), tokens=patches // 4, segments=segments
    )
    rng = np.random.default_rng(patches)
    return rng.integers(0, 256, (patches, config.patch_bytes), np.uint8), layout


@pytest.mark.parametrize(
    ("config", "images", "calls"),
    [
        (CONFIG, [image(CONFIG, 1, 4, 4)], [16]),
        # What attention computes for nothing bounds how many share a call.
        (CONFIG, [image(CONFIG, 1, 4, 4), image(CONFIG, 1, 2, 8)], [32]),
        (CONFIG, [image(CONFIG, 1, 4, 4), image(CONFIG, 1, 2, 8), image(CONFIG, 1, 2, 2)], [32, 4]),
        (CONFIG, [image(CONFIG, 1, 6, 8), image(CONFIG, 1, 2, 2)], [48, 4]),
        # A video is divided between two steps in time, a picture between two tiles.
        (CONFIG, [image(CONFIG, 5, 4, 4)], [32, 32, 16]),
        (TILES, [image(TILES, 1, 2, 6, segments=5)], [24, 24, 12]),
        (TILES, [image(TILES, 1, 2, 6, segments=1), image(TILES, 1, 4, 4, segments=2)], [28, 16]),
    ],
)
def test_pictures_get_their_own_embeddings(
    config: VisionConfig, images: list[Image], calls: list[int]
) -> None:
    runner, engine = fake_runner(config)
    out = runner.encode(images)
    assert engine.calls == calls
    for (patches, layout), embeddings in zip(images, out, strict=True):
        assert np.allclose(embeddings, expected(patches, layout, config))


def test_a_segment_above_the_largest_call_is_refused_before_anything_runs() -> None:
    runner, engine = fake_runner(CONFIG)
    images = [image(CONFIG, 1, 4, 4), image(CONFIG, 1, 10, 10)]
    with pytest.raises(HearthError) as caught:
        runner.encode(images)
    assert caught.value.code == "image_too_large"
    assert "100 patches" in caught.value.message
    assert engine.calls == []


@pytest.mark.parametrize(
    ("grid", "tokens", "segments"),
    [
        ((1, 3, 4), 3, 1),
        ((1, 4, 4), 5, 1),
        ((0, 4, 4), 0, 1),
        ((1, -4, -4), 4, 1),
        ((1, 4, 4), 0, 0),
    ],
)
def test_a_layout_of_another_tower_is_an_error(
    grid: tuple[int, int, int], tokens: int, segments: int
) -> None:
    runner, _ = fake_runner(CONFIG)
    layout = ImageLayout(0, 0, grid, tokens, segments)
    with pytest.raises(HearthError) as caught:
        runner.encode([(np.zeros((16, CONFIG.patch_bytes), np.uint8), layout)])
    assert caught.value.code == "internal"


def test_embeddings_that_are_no_numbers_are_an_error() -> None:
    runner, engine = fake_runner(CONFIG)
    images = [image(CONFIG, 1, 2, 2)]
    engine.factor = np.inf
    with pytest.raises(HearthError) as caught:
        runner.encode(images)
    assert caught.value.code == "non_finite"


def test_closing_frees_the_engine() -> None:
    runner, engine = fake_runner(CONFIG)
    runner.close()
    assert engine.calls == [-1]


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
    parts = [TurnPart("image"), TurnPart("text", spelt), TurnPart("video")]
    vision_inputs = [IMAGE, VIDEO]
    layouts = [one.layout(config) for one in vision_inputs]
    turns = [Turn("system", "be brief"), Turn("user", parts=parts)]
    (ids, _), spans = encode_conversation(
        tokenizer, Conversation(turns), vision_inputs, layouts, config
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
    turns = [Turn("user", parts=[TurnPart("image"), TurnPart("text", "see")])]
    with pytest.raises(HearthError) as caught:
        encode_conversation(tokenizer, Conversation(turns), [IMAGE], [IMAGE.layout(config)], config)
    assert (caught.value.code, caught.value.field) == ("invalid_value", "messages")


def test_a_template_that_shows_parts_alone_gets_text_as_a_part() -> None:
    tokenizer = tokenizer_of("idefics3", SHOWS_NO_TEXT)
    ids = tokenizer.encode_pairs([("system", "be"), ("user", "<image> brief")])
    assert tokenizer.decode(ids) == "be<image> brief"
    assert config_like("idefics3").tokens.image not in ids


def test_a_piece_of_a_prompt_has_special_tokens_and_none_around_it() -> None:
    tokenizer = tokenizer_of("qwen3_vl")
    assert tokenizer.encode_piece("<|image_pad|>") == [config_like("qwen3_vl").tokens.image]


SIZES = [(96, 64), (40, 120), (57, 83)]
TOLERANCE = 1e-4


def embed(folder: Path, config: VisionConfig) -> list[NDArray[Any]]:
    """All pictures at once: [1 + deepstack features, tokens, output_size] each."""
    images = []
    for size in SIZES:
        layout = layout_of(photo(*size), config)
        patches = np.empty((layout.patches, config.patch_bytes), np.uint8)
        patch(PilImage.fromarray(draw(*size)), layout, config, patches)
        images.append((patches, layout))
    runner = VisionRunner.open(folder, config, EngineOptions(threads=1), CpuDevice())
    out = runner.encode(images)
    runner.close()
    return out


@pytest.mark.reference
@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_of_photographs_are_those_of_transformers(
    tmp_path: Path, family: Family, dialect: Dialect
) -> None:
    torch: Any = pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")
    source = write_vision_model(tmp_path / "model", family)
    config = write_vision(source, tmp_path, ExportOptions(dialect=dialect))
    assert config is not None
    ours = embed(tmp_path / VISION_FOLDER, config)
    model = transformers.AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
    processor = transformers.AutoImageProcessor.from_pretrained(source, backend="pil")
    for size, (embeddings, *features) in zip(SIZES, ours, strict=True):
        given = processor(PilImage.fromarray(draw(*size)), return_tensors="pt")
        given = {name: given[name] for name in ("pixel_values", "image_grid_thw") if name in given}
        with torch.no_grad():
            seen = model.eval().model.get_image_features(**given)
        wanted = torch.cat(list(seen.pooler_output)).numpy()
        np.testing.assert_allclose(embeddings, wanted, atol=TOLERANCE, rtol=0)
        stacked = getattr(seen, "deepstack_features", None) or []
        assert len(features) == len(stacked) == config.num_deepstack_features
        for one, other in zip(features, stacked, strict=True):
            wanted = torch.cat(list(other)).numpy()
            np.testing.assert_allclose(one, wanted, atol=TOLERANCE, rtol=0)

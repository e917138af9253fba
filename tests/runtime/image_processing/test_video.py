"""Videos beside the processors of transformers; what needs torchvision is skipped without."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from hearth.runtime.export.vision.tower_model import read_rules
from hearth.runtime.image_processing.decoding import patch
from hearth.runtime.image_processing.raw_frames import frames_of, rate_of
from hearth.runtime.image_processing.sizes import video_layout
from hearth.runtime.images import ImageLayout
from hearth.runtime.text.chat_template import ChatTemplate
from hearth.runtime.text.conversation import Conversation, Turn, TurnPart
from hearth.runtime.text.tokenizer import Tokenizer, TokenizerFile
from hearth.runtime.vision.prompt import VisionInput, encode_conversation, expand
from hearth.runtime.vision_config import VisionConfig
from tests.runtime.image_processing.photographs import IDEFICS, QWEN, config_like, draw, photo
from tests.runtime.vision.tower_config import config_of
from tests.vision_models import FAMILIES, VOCABULARY, Family, make_tokenizer, write_vision_model
from tests.vision_processors import TEMPLATES

RULES: dict[str, Any] = {"fps": 2.0, "min_frames": 4, "max_frames": 16}


def times(count: int, rate: float) -> list[float]:
    return [number / rate for number in range(count)]


def test_all_frames_are_used_where_the_model_does_not_sample() -> None:
    assert frames_of(times(5, 30), config_like("qwen2_5_vl")) == (0, 1, 2, 3, 4)


def test_the_rate_is_that_of_the_times() -> None:
    assert rate_of([3.0, 3.5, 4.0]) == 2.0
    assert rate_of([7.0]) == 24.0
    assert rate_of([0.0, 0.0, 1.0]) == 2.0


def test_known_samples() -> None:
    second = times(30, 10)
    assert frames_of(second, config_like("qwen3_vl", **RULES)) == (0, 6, 12, 17, 23, 29)
    assert frames_of(second, config_like("qwen2_5_vl", **RULES)) == (0, 5, 10, 15, 20, 25)
    smol = config_like("idefics3", fps=1.0, max_frames=8)
    assert frames_of(second, smol) == (0, 14, 29)
    assert frames_of(times(1200, 10), smol)[:2] == (10, 178)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "idefics3"])
def test_a_short_video_has_frames_too(family: Any) -> None:
    for count in (1, 2, 3):
        used = frames_of(times(count, 30), config_like(family, **RULES))
        assert used
        assert set(used) <= set(range(count))


@pytest.mark.reference
def test_frames_are_sampled_as_by_qwen3s_processor() -> None:
    module = pytest.importorskip("transformers.models.qwen3_vl.video_processing_qwen3_vl")
    stub = SimpleNamespace(min_frames=4, max_frames=16)
    for count, rate in some_videos():
        metadata = SimpleNamespace(total_num_frames=count, fps=rate)
        theirs = module.Qwen3VLVideoProcessor.sample_frames(stub, metadata, fps=2.0)
        ours = frames_of(times(count, rate), config_like("qwen3_vl", **RULES))
        assert ours == tuple(theirs.tolist()), (count, rate)


@pytest.mark.reference
def test_frames_are_sampled_as_by_smolvlms_processor() -> None:
    module = pytest.importorskip("transformers.models.smolvlm.video_processing_smolvlm")
    utils = pytest.importorskip("transformers.video_utils")
    stub = SimpleNamespace()
    config = config_like("idefics3", fps=1.0, max_frames=8)
    for count, rate in some_videos():
        metadata = utils.VideoMetadata(count, rate, duration=count / rate)
        theirs = module.SmolVLMVideoProcessor.sample_frames(stub, metadata, num_frames=8, fps=1.0)
        assert frames_of(times(count, rate), config) == tuple(theirs.tolist()), (count, rate)


def some_videos() -> list[tuple[int, float]]:
    numbers = random.Random(3)
    some = [(numbers.randrange(2, 2000), numbers.choice([1.0, 8.0, 25.0, 32.0])) for _ in range(99)]
    return [*some, (2, 30.0), (16, 8.0), (64, 16.0)]


@pytest.mark.reference
def test_frames_are_sampled_as_torch_counts() -> None:
    torch = pytest.importorskip("torch")
    config = config_like("qwen2_5_vl", **RULES)
    for count, rate in some_videos():
        ours = frames_of(times(count, rate), config)
        if len(ours) < 4:
            continue
        theirs = torch.arange(0, count, count / len(ours)).int()
        assert ours == tuple(theirs.tolist()), (count, rate)
        assert len(ours) == np.clip(count / rate * 2.0, 4, min(16, count)) // 2 * 2


HALF = [0.5, 0.5, 0.5]
# A library is gone with its object.
LIBRARY: list[Any] = []
SIZES = [(160, 120), (100, 170), (57, 40)]


@pytest.fixture(scope="module")
def torch() -> Any:
    torch = pytest.importorskip("torch")
    try:
        pytest.importorskip("torchvision")
    except RuntimeError:
        # Its own library does not load beside this build of torch, but the names suffice.
        pair = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        area = "(Tensor input, Tensor rois, float scale, int h, int w, int ratio, bool aligned)"
        LIBRARY.append(torch.library.Library("torchvision", "FRAGMENT"))
        for operator in (f"nms{pair}", f"qnms{pair}", f"roi_align{area} -> Tensor"):
            LIBRARY[-1].define(operator)
        pytest.importorskip("torchvision")
    return torch


def processed(
    torch: Any, processor: Any, frames: list[Any], rate: float, *, sample: bool
) -> tuple[Any, Any]:
    """What a processor makes of a video, and what it notes of its frames."""
    utils = pytest.importorskip("transformers.video_utils")
    count = len(frames)
    found = processor(
        torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2),
        video_metadata=utils.VideoMetadata(count, rate, duration=count / rate),
        do_sample_frames=sample,
        return_tensors="pt",
        return_metadata=True,
    )
    return found, found["video_metadata"][0]


def patches_of(frames: list[Any], layout: ImageLayout, config: VisionConfig) -> Any:
    out = np.zeros((layout.patches, config.patch_bytes), np.uint8)
    for place, number in enumerate(layout.frames):
        patch(Image.fromarray(frames[number]), layout, config, out, frame=place)
    return out


def assert_close(ours: Any, theirs: Any, *, near: int, most: int) -> None:
    off = np.abs(ours - np.rint((theirs * 0.5 + 0.5) * 255).astype(np.int64))
    assert off.max() <= most
    assert (off <= near).mean() >= 0.999


@pytest.mark.reference
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_videos_of_qwen(torch: Any, family: Any, size: tuple[int, int], sample: bool) -> None:  # noqa: FBT001 - a parameter
    models = pytest.importorskip("transformers.models")
    kind = (
        models.qwen3_vl.Qwen3VLVideoProcessor
        if family == "qwen3_vl"
        else models.qwen2_vl.Qwen2VLVideoProcessor
    )
    sampling = {"fps": 2.0, "min_frames": 4, "max_frames": 768} if sample else {}
    config = config_like(family, **sampling)
    rules, rate = config.rules, 5.0
    frames = [draw(*size, seed) for seed in range(11 if sample else 5)]
    processor = kind(
        image_mean=HALF,
        image_std=HALF,
        fps=2.0,
        cap_pixels_per_frame=False,
        size={"shortest_edge": rules.video_min_pixels, "longest_edge": rules.video_max_pixels},
    )
    found, noted = processed(torch, processor, frames, rate, sample=sample)
    times = [number / rate for number in range(len(frames))]
    layout = video_layout([photo(*size)] * len(frames), times, config)
    assert found["video_grid_thw"].tolist() == [list(layout.grid)]
    if sample:
        assert tuple(noted.frames_indices.tolist()) == layout.frames
    theirs = found["pixel_values_videos"].numpy()
    assert_close(patches_of(frames, layout, config), theirs, near=1, most=2)
    if family == "qwen2_5_vl":
        _, ((span,),) = expand([6], [layout], config, lambda _: [], [times])
        seconds = 2 / noted.sampled_fps if sample else 2 / rate
        assert span.interval == pytest.approx(seconds * config.tokens_per_second)


@pytest.mark.reference
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_videos_of_smolvlm(torch: Any, size: tuple[int, int]) -> None:
    models = pytest.importorskip("transformers.models")
    processor = models.smolvlm.SmolVLMVideoProcessor(
        size={"longest_edge": 500}, num_frames=4, fps=1
    )
    config = config_like("idefics3", fps=1.0, max_frames=4)
    frames = [draw(*size, seed) for seed in range(6)]
    found, noted = processed(torch, processor, frames, 2.0, sample=True)
    times = [number / 2.0 for number in range(6)]
    layout = video_layout([photo(*size)] * 6, times, config)
    assert tuple(noted.frames_indices.tolist()) == layout.frames
    tiles = found["pixel_values"][0].numpy().reshape(-1, 3, 13, 2, 14, 13, 2, 14)
    theirs = tiles.transpose(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, config.patch_bytes)
    # Resized twice, and by a Lanczos that rounds otherwise than Pillow's.
    assert_close(patches_of(frames, layout, config), theirs, near=2, most=8)


@pytest.mark.reference
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_with_videos(
    torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Family
) -> None:
    assert torch
    smolvlm = pytest.importorskip("transformers.models.smolvlm.processing_smolvlm")
    monkeypatch.setattr(smolvlm, "num2words", {3: "three"}.get)
    folder = write_vision_model(tmp_path / "model", family, "saved")
    processor = pytest.importorskip("transformers").AutoProcessor.from_pretrained(folder)
    sizes = {"patch_size": 8, "merge_size": 2}
    sizes["temporal_patch_size"] = 1 if family == "idefics3" else 2
    config = config_of(
        family,
        rules=read_rules(folder, family, sizes),
        tokens=IDEFICS if family == "idefics3" else QWEN,
        tokens_per_second=2.0,
        **sizes,
    )
    said = [{"type": "text", "text": text} for text in ("Look: ", "\nand ", " what?")]
    parts = [said[0], {"type": "video"}, said[1], {"type": "image"}, said[2]]
    text = processor.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
    )
    utils = pytest.importorskip("transformers.video_utils")
    theirs = processor(
        text=[text],
        images=[Image.fromarray(draw(90, 50))],
        videos=[np.stack([draw(60, 44)] * 6)],
        video_metadata=[utils.VideoMetadata(6, 2.0, duration=3.0)],
        do_sample_frames=config.rules.fps > 0,
        return_tensors="np",
    )["input_ids"][0]
    vision_inputs = [
        VisionInput([photo(60, 44)] * 6, [k / 2 for k in range(6)]),
        VisionInput([photo(90, 50)]),
    ]
    layouts = [one.layout(config) for one in vision_inputs]
    library = make_tokenizer(family)
    file = TokenizerFile(library, library.get_vocab_size(), None)
    tokenizer = Tokenizer(file, ChatTemplate(TEMPLATES[family], {}), VOCABULARY)
    turn = Turn("user", parts=msgspec.convert([[*one.values()] for one in parts], list[TurnPart]))
    (ids, _), _ = encode_conversation(
        tokenizer, Conversation([turn]), vision_inputs, layouts, config
    )
    assert ids == np.asarray(theirs).tolist()

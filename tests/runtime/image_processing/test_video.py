import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hearth.runtime.image_processing.raw_frames import frames_of, rate_of
from tests.runtime.image_processing.photographs import config_like

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

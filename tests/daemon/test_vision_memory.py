from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from msgspec import structs

from hearth.daemon.actor_plans import encoder_plan, executor_plan
from hearth.daemon.configuration.settings import Settings, replaced, settings_of
from hearth.daemon.engine_settings import runtime_options
from hearth.daemon.vision_memory import most_tokens, open_vision_memory
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.vision_config import VISION_CONFIG_FILE, VISION_FOLDER
from tests.runtime.image_processing.photographs import config_like

SETTINGS = settings_of(
    images_in_flight_bytes=1 << 20,
    image_cache_bytes=1 << 21,
    encoder_nice=5,
    encoder_threads=6,
    threads=7,
    image_decode_timeout_s=8,
    image_decode_memory_bytes=1 << 27,
    restart_limit=2,
)
CONFIG = structs.replace(simulated_config(capacity=400), num_deepstack_features=2)


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    vision = structs.replace(config_like("qwen3_vl"), max_patches=64, position_side=4)
    (tmp_path / VISION_FOLDER).mkdir()
    (tmp_path / VISION_FOLDER / VISION_CONFIG_FILE).write_bytes(msgspec.json.encode(vision))
    return tmp_path


def test_a_model_of_text_alone_has_no_memory_for_pictures(tmp_path: Path) -> None:
    with ExitStack() as opened:
        assert open_vision_memory(SETTINGS, tmp_path, CONFIG, opened) is None
    plan = executor_plan(SETTINGS, tmp_path)
    assert plan.descriptors == ()
    assert runtime_options(SETTINGS).image_memory == 3 << 20, "for one that sees"


def test_the_memory_is_that_of_the_settings_and_of_the_tower(engine: Path) -> None:
    with ExitStack() as opened:
        vision_memory = open_vision_memory(SETTINGS, engine, CONFIG, opened)
        assert vision_memory is not None
        assert (vision_memory.pictures.size, vision_memory.embeddings.size) == (1 << 20, 1 << 21)
        assert vision_memory.token_bytes == 3 * CONFIG.hidden_size * 4
        arenas = vision_memory.arenas()
        largest = most_tokens(SETTINGS, CONFIG) * vision_memory.config.merge_size**2
        assert arenas.patches.take(largest * arenas.patch_bytes) is not None


def test_each_setting_reaches_the_encoder_and_both_processes_inherit_the_memory(
    engine: Path,
) -> None:
    with ExitStack() as opened:
        vision_memory = open_vision_memory(SETTINGS, engine, CONFIG, opened)
        assert vision_memory is not None
        plan = encoder_plan(SETTINGS, engine, "ab", vision_memory)
        executor = executor_plan(SETTINGS, engine, "ab", vision_memory)
        told = msgspec.to_builtins(plan.settings)
        assert told["own"] == msgspec.to_builtins(SETTINGS.encoder)
        assert (told["own"]["encoder_nice"], told["own"]["encoder_threads"]) == (5, 6)
        assert plan.descriptors == executor.descriptors == vision_memory.descriptors
        assert (plan.role, plan.epoch, executor.supervision.restart_limit) == ("encoder", "ab", 2)
        assert plan.supervision.restart_limit == sys.maxsize, (
            "text goes on however often it is lost"
        )
        for name in ("patches", "embeddings"):
            shared = msgspec.to_builtins(getattr(vision_memory, name).shared)
            assert told[name] == msgspec.to_builtins(executor.settings)[name] == shared
        assert told["pictures"] == msgspec.to_builtins(vision_memory.pictures.shared)


def test_an_image_has_half_of_the_longest_prompt_unless_a_setting_says_otherwise() -> None:
    assert most_tokens(Settings(), CONFIG) == 199
    assert most_tokens(settings_of(queue_tokens=100), CONFIG) == 50
    assert most_tokens(settings_of(image_tokens=16), CONFIG) == 16


def test_an_image_has_no_more_before_the_executor_is_there(engine: Path) -> None:
    settings = replaced(SETTINGS, image_tokens=16)
    with ExitStack() as opened:
        vision_memory = open_vision_memory(settings, engine, CONFIG, opened)
        assert vision_memory is not None
        assert vision_memory.prompt_images(cast("Any", None)).most_tokens == 16


def test_a_broken_configuration_of_a_tower_ends_a_start(engine: Path) -> None:
    (engine / VISION_FOLDER / VISION_CONFIG_FILE).write_text("{}")
    with ExitStack() as opened, pytest.raises(HearthError) as caught:
        open_vision_memory(SETTINGS, engine, CONFIG, opened)
    assert caught.value.code == "engine_corrupt"

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from hearth.runtime.errors import HearthError
from hearth.runtime.vision_config import (
    VISION_CONFIG_FILE,
    VISION_FOLDER,
    VisionTokens,
    load_vision_config,
    parse_vision_config,
)
from tests.runtime.vision.tower_config import config_of

CONFIG = config_of("qwen3_vl", position_side=12, deepstack_layers=(0, 1))


def changed(**fields: object) -> bytes:
    return msgspec.json.encode(msgspec.structs.asdict(CONFIG) | fields)


def test_a_folder_has_its_tower_or_none(tmp_path: Path) -> None:
    assert load_vision_config(tmp_path) is None
    (tmp_path / VISION_FOLDER).mkdir()
    with pytest.raises(HearthError) as caught:
        load_vision_config(tmp_path)
    assert (caught.value.code, caught.value.field) == ("engine_missing", "visual")
    (tmp_path / VISION_FOLDER / VISION_CONFIG_FILE).write_bytes(changed())
    assert load_vision_config(tmp_path) == CONFIG


@pytest.mark.parametrize(
    ("data", "code", "field"),
    [
        (b"{", "engine_corrupt", "visual"),
        (changed(unknown=1), "engine_corrupt", "visual"),
        (changed(family="clip"), "engine_corrupt", "visual"),
        (changed(engine_format=99), "engine_incompatible", "engine_format"),
        (changed(merge_size=0), "engine_corrupt", "merge_size"),
        (changed(temporal_patch_size=0), "engine_corrupt", "temporal_patch_size"),
        (changed(position_side=0), "engine_corrupt", "position_side"),
        (changed(head_dim=8), "engine_corrupt", "head_dim"),
        (changed(max_patches=4095), "engine_corrupt", "max_patches"),
        (changed(window_size=112), "engine_corrupt", "window_size"),
        (changed(deepstack_layers=(1, 0)), "engine_corrupt", "deepstack_layers"),
        (changed(deepstack_layers=(0, 2)), "engine_corrupt", "deepstack_layers"),
        (changed(full_attention_layers=(-1,)), "engine_corrupt", "full_attention_layers"),
        (changed(rules=replace(CONFIG.rules, min_pixels=0)), "engine_corrupt", "rules"),
        (changed(rules=replace(CONFIG.rules, tile_size=28)), "engine_corrupt", "rules"),
        (changed(rules=replace(CONFIG.rules, std=(1, 0, 1))), "engine_corrupt", "rules"),
        (changed(tokens=VisionTokens(image=-1)), "engine_corrupt", "tokens"),
    ],
)
def test_what_is_wrong_is_named(data: bytes, code: str, field: str) -> None:
    with pytest.raises(HearthError) as caught:
        parse_vision_config(data)
    assert (caught.value.code, caught.value.field) == (code, field)

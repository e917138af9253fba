from typing import Any

from hearth.runtime.vision_config import Family, ImageRules, VisionConfig, VisionTokens


def config_of(family: Family, **fields: Any) -> VisionConfig:
    known: dict[str, Any] = {
        "hearth_version": "0",
        "backend": "onnxruntime",
        "dialect": "classic",
        "family": family,
        "dtype": "float32",
        "num_layers": 2,
        "num_heads": 2,
        "head_dim": 16,
        "hidden_size": 32,
        "output_size": 48,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "max_patches": 4096,
        "rules": ImageRules(
            resample="bicubic",
            mean=(0.5, 0.5, 0.5),
            std=(0.5, 0.5, 0.5),
            min_pixels=3136,
            max_pixels=1 << 20,
        ),
        "tokens": VisionTokens(image=1),
    }
    return VisionConfig(**known | fields)

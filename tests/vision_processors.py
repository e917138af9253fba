"""Processor files and chat templates of the models in `tests.vision_models`."""

from typing import Any

_QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_IDEFICS_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'] is string %}: {{ message['content'] }}{% else %}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}"
    "{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}"
    "{% elif line['type'] == 'video' %}{{ '<video>' }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
TEMPLATES = {
    "qwen3_vl": _QWEN_TEMPLATE,
    "qwen2_5_vl": _QWEN_TEMPLATE,
    "idefics3": _IDEFICS_TEMPLATE,
}
_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
_HALF = [0.5, 0.5, 0.5]
_STEPS: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "rescale_factor": 1 / 255,
}


def colours_of(family: str) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each colour."""
    return (_CLIP_MEAN, _CLIP_STD) if family == "qwen2_5_vl" else (_HALF, _HALF)


def processor_files(family: str, spelling: str, vision: dict[str, Any]) -> dict[str, Any]:
    """The files that say how pictures are prepared, by name.

    As published each processor has a file of its own; later there is one for all of them.
    """
    if family == "idefics3":
        return _idefics_files(spelling, vision)
    name = "Qwen3VL" if family == "qwen3_vl" else "Qwen2_5_VL"
    sizes = {"patch_size": vision["patch_size"], "temporal_patch_size": 2, "merge_size": 2}
    mean, std = colours_of(family)
    both = {**sizes, "image_mean": mean, "image_std": std}
    image = {**both, "image_processor_type": "Qwen2VLImageProcessor"}
    videos = "Qwen3VL" if family == "qwen3_vl" else "Qwen2VL"
    video = {**both, "video_processor_type": f"{videos}VideoProcessor"}
    pixels = {"shortest_edge": 1024, "longest_edge": 65_536}
    video_pixels = {"shortest_edge": 2048, "longest_edge": 131_072}
    sampling = {"fps": 2, "min_frames": 4, "max_frames": 16}
    if spelling == "saved":
        image = _STEPS | image | {"size": pixels, "resample": 3}
        video = _STEPS | video | {"size": video_pixels, "resample": 3, **sampling}
        return {
            "processor_config.json": {
                "image_processor": image,
                "processor_class": f"{name}Processor",
                "video_processor": video,
            }
        }
    if family == "qwen3_vl":
        image["size"] = pixels
        files = {"video_preprocessor_config.json": {**video, "size": video_pixels, **sampling}}
    else:
        image |= {"min_pixels": 1024, "max_pixels": 65_536}
        files = {}
    return {"preprocessor_config.json": {**image, "processor_class": f"{name}Processor"}, **files}


def _idefics_files(spelling: str, vision: dict[str, Any]) -> dict[str, Any]:
    tile, name = vision["image_size"], "Idefics3" if spelling == "published" else "SmolVLM"
    image = _STEPS | {
        "do_image_splitting": True,
        "do_pad": True,
        "image_mean": _HALF,
        "image_std": _HALF,
        "resample": 1,
        "max_image_size": {"longest_edge": tile},
        "size": {"longest_edge": 4 * tile},
        "image_processor_type": f"{name}ImageProcessor",
    }
    words = {
        "image_seq_len": (tile // vision["patch_size"] // 2) ** 2,
        "processor_class": f"{name}Processor",
    }
    sampling = {"fps": 1, "max_frames": 8, "video_size": {"longest_edge": tile}}
    if spelling == "published":
        return {
            "preprocessor_config.json": {**image, "video_sampling": sampling},
            "processor_config.json": words,
        }
    video = _STEPS | {
        "image_mean": _HALF,
        "image_std": _HALF,
        "resample": 1,
        "size": {"longest_edge": 4 * tile},
        "max_image_size": {"longest_edge": tile},
        "fps": 1,
        "num_frames": 8,
        "do_sample_frames": False,
        "video_processor_type": "SmolVLMVideoProcessor",
    }
    return {"processor_config.json": {**words, "image_processor": image, "video_processor": video}}

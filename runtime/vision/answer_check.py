"""Lets a vision tower encode the pictures of its known answer, and compares what it gives."""

import numpy as np

from runtime.tensors.dtypes import numpy_dtype
from runtime.tower_answer import TowerAnswer, TowerReport, answer_pictures
from runtime.vision.vision_runner import VisionRunner


def check_tower_answer(runner: VisionRunner, answer: TowerAnswer) -> TowerReport:
    """Raises `wrong_answer` for the first output that is off, and what an encode raises."""
    config, pictures = runner.config, answer_pictures(runner.config)
    outputs = 1 + config.num_deepstack_features
    out = [
        np.empty((outputs, layout.tokens, config.output_size), numpy_dtype(config.dtype))
        for _, layout in pictures
    ]
    runner.encode(pictures, out)
    return answer.compare(out)

"""Lets a vision tower encode the pictures of its known answer, and compares what it gives."""

from pathlib import Path

from runtime.tower_answer import TowerReport, answer_pictures, load_tower_answer
from runtime.vision.vision_runner import VisionRunner


def check_tower_answer(runner: VisionRunner, folder: Path) -> TowerReport:
    """Compare with the known answer in a folder `visual`.

    Raises `wrong_answer` for the first output that is off, `engine_corrupt`, and what an encode
    raises.
    """
    answer = load_tower_answer(folder, runner.config)
    return answer.compare(runner.encode(answer_pictures(runner.config)))

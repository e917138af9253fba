"""Known answer of a vision encoder to pictures of noise that follow from its sizes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from hearth.runtime.engine_folder import ANSWER_FILE
from hearth.runtime.errors import HearthError
from hearth.runtime.images import ImageLayout
from hearth.runtime.vision.vision_runner import VisionRunner
from hearth.runtime.vision_config import VisionConfig

MIXES = 8
"""Number of sums that replace the embedding of a token."""
_GOLDEN, _BITS = 2_654_435_761, 32


class TowerReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a check that passed: sums compared, none off by more than `error` tolerances."""

    compared: int
    error: float


class TowerAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`mixes` [1 + deepstack features, tokens of all pictures, `MIXES`] of what comes out.

    Those of each output may be off by its number in `tolerances`.
    """

    mixes: tuple[tuple[tuple[float, ...], ...], ...]
    tolerances: tuple[Annotated[float, Meta(gt=0)], ...]

    def compare(self, out: Sequence[NDArray[Any]]) -> TowerReport:
        """Compare embeddings [1 + deepstack features, tokens, H], one array for each picture.

        Raises `wrong_answer` for the first output that is off.
        """
        given = mixed(np.concatenate([one.astype(np.float32) for one in out], axis=1))
        wanted = np.array(self.mixes, np.float32)
        # What is not finite is off as well.
        errors = np.nan_to_num(np.abs(given - wanted), nan=np.inf).max(axis=(1, 2))
        for number, (error, tolerance) in enumerate(zip(errors, self.tolerances, strict=True)):
            if error > tolerance:
                name = "embeddings" if number == 0 else f"deepstack_{number - 1}"
                raise HearthError(
                    "wrong_answer",
                    f"the vision tower does not compute its model ({name}: off by {error:.4g}, "
                    f"{tolerance:.4g} is allowed): export the model again, and if that does not "
                    "help, for another dialect, backend or device",
                    "engine",
                )
        error = float((errors / np.array(self.tolerances)).max())
        return TowerReport(compared=wanted.size, error=error)


def mixed(outputs: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sums of [..., H] with signs that are as good as random: [..., MIXES]."""
    width = outputs.shape[-1]
    signs = 1 - 2 * (_scattered(MIXES * width) >> (_BITS - 1)).astype(np.float32)
    sums: NDArray[np.float32] = outputs @ (signs.reshape(MIXES, width).T * np.float32(width**-0.5))
    return sums


def answer_pictures(config: VisionConfig) -> list[tuple[NDArray[np.uint8], ImageLayout]]:
    """Patches [T, patch_bytes] of two pictures and what they are of.

    The first is larger than a window each way, the second a video where there are such.
    """
    merge = config.merge_size
    beyond = beyond_a_window(config.window_size // config.patch_size // merge)
    frames = 1 if config.temporal_patch_size == 1 else 2
    pictures, begin = [], 0
    for time, height, width in ((1, *beyond), (frames, 1, 2)):
        layout = ImageLayout(
            height=height * merge * config.patch_size,
            width=width * merge * config.patch_size,
            grid=(time, height * merge, width * merge),
            tokens=time * height * width,
        )
        size = layout.patches * config.patch_bytes
        noise = _scattered(begin + size)[begin:] >> (_BITS - 8)
        begin += size
        pictures.append((noise.astype(np.uint8).reshape(layout.patches, -1), layout))
    return pictures


def beyond_a_window(window: int) -> tuple[int, int]:
    """Height and width, in tokens, of the larger picture, where a window is so long; 0 for none."""
    side = window or 2
    return side + 2, side + 1


def load_tower_answer(folder: Path, config: VisionConfig) -> TowerAnswer:
    """The known answer in a folder `visual`; raises `engine_corrupt`."""
    try:
        answer = msgspec.json.decode((folder / ANSWER_FILE).read_bytes(), type=TowerAnswer)
    except (OSError, msgspec.MsgspecError) as error:
        raise _corrupt() from error
    tokens = sum(layout.tokens for _, layout in answer_pictures(config))
    outputs = 1 + config.num_deepstack_features
    sizes = [len(answer.mixes), len(answer.tolerances), *map(len, answer.mixes)]
    if sizes != [outputs, outputs, *[tokens] * outputs] or any(
        len(sums) != MIXES for output in answer.mixes for sums in output
    ):
        raise _corrupt()
    return answer


def _scattered(count: int) -> NDArray[np.uint32]:
    """Multiples of the golden ratio, scattered once more (Knuth, volume 3, 6.4)."""
    numbers = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN % (1 << _BITS)
    numbers ^= numbers >> 15
    return (numbers * _GOLDEN % (1 << _BITS)).astype(np.uint32)


def _corrupt() -> HearthError:
    name = f"visual/{ANSWER_FILE}"
    return HearthError("engine_corrupt", f"{name} cannot be read: export the model again", name)


def check_tower_answer(runner: VisionRunner, folder: Path) -> TowerReport:
    """Compare with the known answer in a folder `visual`.

    Raises `wrong_answer` for the first output that is off, `engine_corrupt`, and what an encode
    raises.
    """
    answer = load_tower_answer(folder, runner.config)
    return answer.compare(runner.encode(answer_pictures(runner.config)))

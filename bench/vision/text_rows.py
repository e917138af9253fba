"""Cost of rows with images to the text beside them."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import median

import msgspec

from hearth.bench.batches import rows_of, run_batch
from hearth.bench.vision.asking import QUESTION
from hearth.daemon.cli.image_files import encode_files
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions, SpeculationOptions
from hearth.runtime.request import RequestOptions, RowRequest
from hearth.runtime.text.conversation import Conversation
from hearth.runtime.text.tokenizer import Tokenizer
from hearth.runtime.vision.vision_runner import LocalEmbeddings

_ROWS = 4
_TEXT = "the lamp in the kitchen is on and the window is open "


class TextRowFigures(msgspec.Struct, kw_only=True):
    """Median milliseconds of a decode step of a text row beside three others.

    `loss` is the share of its rate that the row loses where the others have images.
    """

    loss: float
    beside_images_ms: float
    beside_text_ms: float
    prompt_tokens: int


def measure_text_rows(engine: Path, picture: Path, rounds: int, tokens: int) -> TextRowFigures:
    """Decode batches of four rows of equal length, with and without images, in turns."""
    store = LocalEmbeddings()
    tokenizer = Tokenizer.open(engine)
    prompt = encode_files(engine, [picture], store, 0).prompt(tokenizer, QUESTION, Conversation([]))
    ids, images = prompt.ids, [*prompt.images]
    text = tokenizer.encode_piece(_TEXT)
    text = (text * (len(ids) // len(text) + 1))[: len(ids)]
    asked = RequestOptions(max_tokens=tokens, ignore_eos=True)
    plain = rows_of([text] * _ROWS, asked)
    seeing = [
        RowRequest(token_ids=ids, prompt_length=len(ids), options=asked, images=images)
        for _ in plain[1:]
    ]
    off = SpeculationOptions(method="off")
    options = RuntimeOptions(verify=False, max_batch=_ROWS, speculation=off)
    beside: dict[str, list[float]] = {"images": [], "text": []}
    with closing(LLMInferenceRuntime.open(engine, options, embeddings=store)) as runtime:
        runtime.capture(range(1, runtime.max_batch + 1))
        for turn in range(rounds + 1):
            order = (("images", [plain[0], *seeing]), ("text", plain))
            for name, rows in order if turn % 2 else reversed(order):
                seconds = _steps(runtime, rows)
                # The first batches find everything cold.
                beside[name] += seconds if turn else []
    step = {name: 1000 * median(seconds) for name, seconds in beside.items()}
    return TextRowFigures(
        loss=1 - step["text"] / step["images"],
        beside_images_ms=step["images"],
        beside_text_ms=step["text"],
        prompt_tokens=len(ids),
    )


def _steps(runtime: LLMInferenceRuntime, rows: Sequence[RowRequest]) -> list[float]:
    """Seconds of each decode step of all rows of a batch."""
    steps = run_batch(runtime, rows).steps
    return [one.seconds for one in steps if one.kind == "decode" and one.rows == len(rows)]

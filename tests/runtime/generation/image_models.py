"""Rows with images for small models that see, and what the specification says of their text."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from hearth.runtime.config import DType, load_config
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.image_families import text_name
from hearth.runtime.export.layout import EMBEDDING
from hearth.runtime.export.model_config import ModelConfig, load_model_config
from hearth.runtime.export.reference_pass import RoundedWeights, decode
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.image_processing.positions import row_positions
from hearth.runtime.images import EmbeddedImage, ImageSpan
from hearth.runtime.request import RequestOptions, RowRequest, RowToken
from hearth.runtime.tensors.tensor import numpy_dtype
from hearth.runtime.vision.vision_runner import LocalEmbeddings
from tests.references.images import rotary_rows
from tests.vision_models import TEXT, Family

TOLERANCE = 2e-3
STORE = LocalEmbeddings()
# Grids of the images of each row, and of a video of two frames: rows with and without images.
GRIDS: list[list[tuple[int, int, int]]] = [
    [(1, 2, 3)],
    [],
    [(1, 4, 2), (1, 1, 3)],
    [(2, 2, 2)],
    [(1, 3, 5)],
    [],
]
FEATURES = {"qwen3_vl": 2, "qwen2_5_vl": 0, "idefics3": 0}


def image_rows(family: Family, dtype: DType = "float32", tokens: int = 8) -> list[RowRequest]:
    """Greedy rows of text around images, whose embeddings are of the engine's type."""
    features, counted = FEATURES[family], family != "idefics3"
    random = np.random.default_rng(11)
    rows = []
    for number, grids in enumerate(GRIDS):
        ids = _text(random, 2 + number)
        images = []
        for grid in grids:
            count, hidden = int(np.prod(grid)), TEXT["hidden_size"]
            array = random.normal(0, 0.7, (1 + features, count, hidden)).astype(numpy_dtype(dtype))
            spans = [ImageSpan(len(ids), count, 0, grid)]
            ids += [5] * count + _text(random, 3)
            if not counted:
                spans = _runs(spans[0])
                ids.insert(spans[-1].start - 1, 20)
            images.append(EmbeddedImage(STORE.put(array), count, tuple(spans)))
        ids += _text(random, 1 + number % 3)
        options = RequestOptions(max_tokens=tokens + number, ignore_eos=True, logprobs=0)
        rows.append(
            RowRequest(token_ids=ids, prompt_length=len(ids), options=options, images=images)
        )
    return rows


def _runs(span: ImageSpan) -> list[ImageSpan]:
    """Two runs of a span with a token between, without a grid."""
    first = span.length // 2
    return [
        ImageSpan(span.start, first),
        ImageSpan(span.start + first + 1, span.length - first, first),
    ]


def _text(random: np.random.Generator, length: int) -> list[int]:
    return [int(token) for token in random.integers(10, TEXT["vocab_size"], length)]


@cache
def _specification(source: Path, folder: Path) -> tuple[ModelConfig, RoundedWeights]:
    weights = RoundedWeights(Checkpoint(source, text_name), load_config(folder))
    return load_model_config(source), weights


def reference_logits(source: Path, folder: Path, row: RowRequest) -> NDArray[np.float32]:
    """The logits [T, V] behind all of a row's tokens, of which those of its prompt have images."""
    model, weights = _specification(source, folder)
    config, length = load_config(folder), len(row.token_ids)
    values = np.zeros((1 + config.num_deepstack_features, length, model.hidden_size), np.float32)
    values[0] = weights.embed(EMBEDDING, row.token_ids)
    spans = [span for image in row.images for span in image.spans]
    for image in row.images:
        for span in image.spans:
            found = STORE.read(image)[:, span.first : span.first + span.length]
            values[:, span.start : span.start + span.length] = found
    prompt, delta = row_positions(row.prompt_length, spans)
    positions = np.tile(np.arange(length, dtype=np.int32) + delta, (3, 1))
    positions[:, : prompt.shape[1]] = prompt
    if not config.use_context_dependent_rope:
        positions[:] = np.arange(length)
    rope = config.rope_config
    if not rope.mrope_section:
        rope = structs.replace(rope, mrope_section=(config.rotary_dim // 2, 0, 0))
    logits: Any = decode(model, weights, values[0], rotary_rows(rope, positions), [*values[1:]])
    return np.asarray(logits, np.float32)


def check_text(
    models: tuple[Path, Path],
    row: RowRequest,
    tokens: Sequence[RowToken],
    *,
    free: bool = True,
    tolerance: float = TOLERANCE,
) -> None:
    """Each token has the likelihood of the specification, and is the likeliest or as good.

    `models` are the folders of the model and of its engine. Tokens that were not `free` were
    forced.
    """
    ids = [token.token_id for token in tokens]
    whole = structs.replace(row, token_ids=row.token_ids + ids)
    logits = reference_logits(*models, whole)[row.prompt_length - 1 : -1]
    logits = logits[len(logits) - len(tokens) :]
    top = logits.max(axis=-1)
    chances = logits - (top + np.log(np.exp(logits - top[:, None]).sum(axis=-1)))[:, None]
    assert len(tokens) == len(chances) > 0
    for token, own in zip(tokens, chances, strict=True):
        assert token.logprob is not None
        assert abs(token.logprob - own[token.token_id]) < tolerance
        assert not free or own.max() - own[token.token_id] < tolerance


def arriving(
    runtime: LLMInferenceRuntime, rows: Sequence[RowRequest], apart: int
) -> list[list[RowToken]]:
    """The tokens of rows that come so many steps apart, as there is room."""
    found: list[list[RowToken]] = [[] for _ in rows]
    numbers: dict[int, int] = {}
    due, step = list(enumerate(rows)), 0
    while due or runtime.active:
        while due and runtime.free and step >= due[0][0] * apart:
            place, row = due.pop(0)
            if not runtime.active:
                numbers = {}
            numbers[runtime.admit([row])[0]] = place
        if runtime.active:
            for token in runtime.step().tokens:
                assert token.error is None
                found[numbers[token.row]].append(token)
        step += 1
    return found

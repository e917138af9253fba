"""Rows with and without an image through a decoder's graph, against transformers."""

from functools import partial
from pathlib import Path

import numpy as np

from tests.references.images import image_rows, rotary_rows, stored_logits
from tests.runtime.export.graph_driver import Array, GraphDriver
from tests.vision_models import Family

CAPACITY = 48
ROWS = 2


def compare_images(
    folder: Path,
    family: Family,
    chunk: int,
    tolerance: float,
    kind: type[GraphDriver] = GraphDriver,
) -> None:
    """Compare the logits of the engine of `write_vision_model(..., family)` in `folder`."""
    driver = kind(folder, ROWS, capacity=CAPACITY)
    for logits, expected in zip(
        logits_of(driver, family, chunk), stored_logits(family), strict=True
    ):
        np.testing.assert_allclose(logits, expected, atol=tolerance, rtol=0)


def logits_of(driver: GraphDriver, family: Family, chunk: int) -> list[Array]:
    """Those of all `ROWS` in one batch, by chunks; a row that is through is fed on all the same."""
    rows = image_rows(family)
    longest = max(len(row.token_ids) for row in rows)
    if driver.config.use_context_dependent_rope:
        for place, row in enumerate(rows):
            tables = rotary_rows(driver.config.rope_config, row.positions)
            for table, values in zip(driver.rope.values(), tables, strict=True):
                table[place, : len(values)] = values
    pad = partial(_padded, length=longest)
    ids = np.stack([pad(row.token_ids) for row in rows])
    seen = np.stack([pad(row.seen) for row in rows])
    embeds = np.where(
        seen[..., None],
        np.stack([pad(row.embeds) for row in rows]),
        driver.table[ids].astype(np.float32),
    )
    features = np.stack([pad(row.features.swapaxes(0, 1)) for row in rows])
    parts = []
    for begin in range(0, longest, chunk):
        piece = slice(begin, begin + chunk)
        steps = np.tile(np.arange(ids[0, piece].size), (len(rows), 1))
        more = {f"deepstack_embeds_{k}": features[:, piece, k] for k in range(features.shape[2])}
        driver.outputs = driver.run(
            ids[:, piece], steps + begin, steps, inputs_embeds=embeds[:, piece], **more
        )
        driver.commit([steps.shape[1]] * len(rows))
        parts.append(driver.outputs["logits"])
    logits = np.concatenate(parts, axis=1)
    return [logits[place, : len(row.token_ids)] for place, row in enumerate(rows)]


def _padded(values: Array, *, length: int) -> Array:
    return np.pad(values, [(0, length - len(values)), *[(0, 0)] * (values.ndim - 1)])

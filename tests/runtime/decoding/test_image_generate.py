"""Greedy text of transformers' `generate` for pictures, and ours from the tower's embeddings."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.export import ExportOptions, export_model
from runtime.images import EmbeddedImage, ImageSpan
from runtime.options import RuntimeOptions
from runtime.pictures.local_embeddings import LocalEmbeddings
from runtime.request import GenerationRequest, RequestOptions, RowRequest
from tests.vision_models import FAMILIES, Family, write_vision_model

pytestmark = pytest.mark.reference
TOKENS = 16
NEAR_TIE = 1e-3
GRIDS = [(1, 4, 6), (1, 2, 8)]
"""Patches of the pictures of a prompt."""
MERGE = 2


def prompt(family: Family) -> tuple[list[int], list[ImageSpan]]:
    """Text around the pictures, and where these stand."""
    random = np.random.default_rng(2)
    image_id = 4 if family == "idefics3" else 5
    ids: list[int] = random.integers(30, 320, 4).tolist()
    spans = []
    for grid in GRIDS:
        merged = (1, grid[1] // MERGE, grid[2] // MERGE)
        # Idefics3 has pictures of one size, whose tokens are counted as text is.
        length = 4 if family == "idefics3" else int(np.prod(merged))
        spans.append(ImageSpan(len(ids), length, 0, (0, 0, 0) if family == "idefics3" else merged))
        ids += [image_id] * length + random.integers(30, 320, 3).tolist()
    return ids, spans


def inputs(torch: Any, family: Family, ids: list[int]) -> dict[str, Any]:
    """What transformers' models are given."""
    random = np.random.default_rng(3)
    given = {"input_ids": torch.tensor([ids])}
    if family == "idefics3":
        pixels = random.standard_normal((1, len(GRIDS), 3, 32, 32)).astype(np.float32)
        return {**given, "pixel_values": torch.tensor(pixels)}
    patches = sum(int(np.prod(grid)) for grid in GRIDS)
    pixels = random.standard_normal((patches, 3 * 2 * 8 * 8)).astype(np.float32)
    kinds = torch.tensor([[int(token == 5) for token in ids]])
    return {
        **given,
        "pixel_values": torch.tensor(pixels),
        "image_grid_thw": torch.tensor(GRIDS),
        "mm_token_type_ids": kinds,
    }


def embeddings(torch: Any, model: Any, given: dict[str, Any], spans: list[ImageSpan]) -> list[Any]:
    """[1 + features, tokens, H] of each picture, by transformers' tower."""
    names = {"pixel_values", "image_grid_thw"} & given.keys()
    with torch.no_grad():
        found = model.model.get_image_features(**{name: given[name] for name in names})
    kinds = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
    whole = np.stack([torch.cat(tuple(kind)).numpy() for kind in kinds])
    return np.split(whole, np.cumsum([span.length for span in spans])[:-1], axis=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_transformers(tmp_path: Path, family: Family) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    source = write_vision_model(tmp_path / "m", family, "saved")
    loader: Any = transformers.AutoModelForImageTextToText
    model = loader.from_pretrained(source, dtype=torch.float32).eval()
    ids, spans = prompt(family)
    given = inputs(torch, family, ids)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        out = model.generate(
            **given,
            max_new_tokens=TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    expected = out.sequences[0, len(ids) :].tolist()
    store = LocalEmbeddings()
    arrays = embeddings(torch, model, given, spans)
    images = [
        EmbeddedImage(store.put(array), span.length, (span,))
        for array, span in zip(arrays, spans, strict=True)
    ]
    export_model(source, tmp_path / "engine", ExportOptions(prefill_chunk=9))
    options = RequestOptions(max_tokens=TOKENS, ignore_eos=True, logprobs=0)
    row = RowRequest(token_ids=ids, prompt_length=len(ids), options=options, images=images)
    runtime = LLMInferenceRuntime.open(
        tmp_path / "engine", RuntimeOptions(threads=1), embeddings=store
    )
    with closing(runtime):
        (answer,) = runtime.handle_request(GenerationRequest(rows=[row])).rows
    for place, (token, wanted) in enumerate(zip(answer.token_ids, expected, strict=True)):
        chances = out.logits[place][0].log_softmax(dim=-1)
        assert abs(chances[token] - answer.logprobs[place]) < NEAR_TIE
        if token != wanted:
            assert chances[wanted] - chances[token] < NEAR_TIE
            break

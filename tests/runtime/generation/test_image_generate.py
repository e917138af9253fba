"""Greedy text of transformers' `generate` for pictures, and ours from the tower's embeddings."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.images import EmbeddedImage, ImageSpan
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import GenerationRequest, RequestOptions, RowRequest
from hearth.runtime.vision.vision_runner import LocalEmbeddings
from tests.vision_models import FAMILIES, Family, write_vision_model

pytestmark = [pytest.mark.reference, pytest.mark.slow]
TOKENS = 16
NEAR_TIE = 1e-3
GRIDS = [(1, 4, 6), (1, 2, 8)]
"""Patches of the pictures of a prompt."""
VIDEO, SECONDS = (3, 4, 4), 1.5
"""Those of a video, and the seconds from one of its steps in time to the next."""
MERGE = 2
PER_SECOND = 2


def visuals(family: Family, *, video: bool) -> list[list[ImageSpan]]:
    """Where each visual stands, counted from the begin of its spans."""
    if family == "idefics3":
        # Pictures of one size, whose tokens are counted as text is.
        return [[ImageSpan(0, 4)]] * len(GRIDS)
    merged = [(time, height // MERGE, width // MERGE) for time, height, width in [*GRIDS, VIDEO]]
    spans = [[ImageSpan(0, int(np.prod(grid)), 0, grid)] for grid in merged]
    time, height, width = merged[-1]
    if family == "qwen2_5_vl":
        spans[-1] = [structs.replace(spans[-1][0], interval=PER_SECOND * SECONDS)]
    else:
        # Each frame has text of its own.
        size = height * width
        spans[-1] = [
            ImageSpan(frame * (size + 2), size, frame * size, (1, height, width))
            for frame in range(time)
        ]
    return spans if video else spans[:-1]


def prompt(family: Family, *, video: bool) -> tuple[list[int], list[int], list[list[ImageSpan]]]:
    """Text around the visuals; of each token whether it is of a picture or a video; the spans."""
    random = np.random.default_rng(2)
    ids: list[int] = random.integers(30, 320, 4).tolist()
    kinds, found = [0] * 4, []
    for number, spans in enumerate(visuals(family, video=video)):
        kind, begin = 1 + (number == len(GRIDS)), len(ids)
        found.append([structs.replace(span, start=begin + span.start) for span in spans])
        for span in found[-1]:
            ahead = span.start - len(ids)
            ids += random.integers(30, 320, ahead).tolist()
            ids += [3 + kind if family == "idefics3" else 4 + kind] * span.length
            kinds += [0] * ahead + [kind] * span.length
        ids += random.integers(30, 320, 3).tolist()
        kinds += [0] * 3
    return ids, kinds, found


def inputs(torch: Any, family: Family, *, video: bool) -> dict[str, Any]:
    """The pixels that transformers' models are given."""
    random = np.random.default_rng(3)
    if family == "idefics3":
        pixels = random.standard_normal((1, len(GRIDS), 3, 32, 32)).astype(np.float32)
        return {"pixel_values": torch.tensor(pixels)}
    patches = sum(int(np.prod(grid)) for grid in GRIDS)
    pixels, frames = (
        torch.tensor(random.standard_normal((count, 3 * 2 * 8 * 8)).astype(np.float32))
        for count in (patches, int(np.prod(VIDEO)))
    )
    given = {"pixel_values": pixels, "image_grid_thw": torch.tensor(GRIDS)}
    if video:
        given |= {"pixel_values_videos": frames, "video_grid_thw": torch.tensor([VIDEO])}
    if video and family == "qwen2_5_vl":
        given["second_per_grid_ts"] = torch.tensor([SECONDS])
    return given


def embeddings(
    torch: Any, model: Any, given: dict[str, Any], spans: list[list[ImageSpan]]
) -> list[Any]:
    """[1 + features, tokens, H] of each visual, by transformers' tower."""
    parts = []
    for kind, names in (
        ("image", {"pixel_values", "image_grid_thw"}),
        ("video", {"pixel_values_videos", "video_grid_thw"}),
    ):
        taken = {name: given[name] for name in names & given.keys()}
        if not taken:
            continue
        with torch.no_grad():
            found = getattr(model.model, f"get_{kind}_features")(**taken)
        kinds = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        parts.append(np.stack([torch.cat(tuple(one)).numpy() for one in kinds]))
    tokens = [sum(span.length for span in one) for one in spans]
    return np.split(np.concatenate(parts, axis=1), np.cumsum(tokens)[:-1], axis=1)


@pytest.mark.parametrize(
    ("family", "video"),
    [*((family, False) for family in FAMILIES), ("qwen3_vl", True), ("qwen2_5_vl", True)],
)
def test_greedy_text_is_that_of_transformers(
    tmp_path: Path, family: Family, *, video: bool
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    source = write_vision_model(tmp_path / "m", family, "saved")
    loader: Any = transformers.AutoModelForImageTextToText
    model = loader.from_pretrained(source, dtype=torch.float32).eval()
    ids, kinds, spans = prompt(family, video=video)
    given = inputs(torch, family, video=video)
    if family != "idefics3":
        given["mm_token_type_ids"] = torch.tensor([kinds])
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        out = model.generate(
            input_ids=torch.tensor([ids]),
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
        EmbeddedImage(store.put(array), array.shape[1], tuple(one))
        for array, one in zip(arrays, spans, strict=True)
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

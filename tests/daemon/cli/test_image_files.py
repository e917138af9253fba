"""From picture files to text in one process, beside transformers."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hearth.daemon.cli.image_files import encode_files
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import GenerationRequest, RequestOptions, RowRequest
from hearth.runtime.text.conversation import Conversation
from hearth.runtime.text.tokenizer import Tokenizer
from hearth.runtime.vision.vision_runner import LocalEmbeddings
from tests.runtime.image_processing.photographs import draw
from tests.vision_models import FAMILIES, Family, write_vision_model

pytestmark = [pytest.mark.reference, pytest.mark.slow]
SIZES = [(96, 64), (40, 120)]
TOKENS = 12
NEAR_TIE = 2e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_say_what_they_say_in_transformers(tmp_path: Path, family: Family) -> None:
    torch: Any = pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")
    source, engine = write_vision_model(tmp_path / "model", family), tmp_path / "engine"
    export_model(source, engine, ExportOptions(max_batch=2, capacity=512, prefill_chunk=32))
    pictures = [Image.fromarray(draw(*size)) for size in SIZES]
    files = [tmp_path / f"{place}.png" for place in range(len(pictures))]
    for picture, file in zip(pictures, files, strict=True):
        picture.save(file)
    store = LocalEmbeddings()
    prompt = encode_files(engine, files, store, 1).prompt(
        Tokenizer.open(engine), "the lamp", Conversation([])
    )
    ids, images = prompt.ids, [*prompt.images]

    model = transformers.AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
    processor = transformers.AutoImageProcessor.from_pretrained(source, backend="pil")
    given = dict(processor([pictures], return_tensors="pt"))
    kinds = np.zeros(len(ids), np.int64)
    for span in (span for image in images for span in image.spans):
        kinds[span.start : span.start + span.length] = 1
    if family != "idefics3":
        given["mm_token_type_ids"] = torch.tensor(kinds[None])
    names = {"pixel_values", "image_grid_thw", "mm_token_type_ids", "pixel_attention_mask"}
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        out = model.eval().generate(
            input_ids=torch.tensor([ids]),
            **{name: given[name] for name in names & given.keys()},
            max_new_tokens=TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    options = RequestOptions(max_tokens=TOKENS, ignore_eos=True, logprobs=0)
    row = RowRequest(token_ids=ids, prompt_length=len(ids), options=options, images=images)
    runtime = LLMInferenceRuntime.open(engine, RuntimeOptions(threads=1), embeddings=store)
    with closing(runtime):
        (answer,) = runtime.handle_request(GenerationRequest(rows=[row])).rows
    expected = out.sequences[0, len(ids) :].tolist()
    for place, (token, wanted) in enumerate(zip(answer.token_ids, expected, strict=True)):
        chances = out.logits[place][0].log_softmax(dim=-1)
        assert abs(chances[token] - answer.logprobs[place]) < NEAR_TIE
        if token != wanted:
            assert chances[wanted] - chances[token] < NEAR_TIE
            break

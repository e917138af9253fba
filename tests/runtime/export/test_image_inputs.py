"""What a decoder that takes images has beside one of text: tables by row, and added features."""

from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from hearth.runtime.config import RopeConfig
from hearth.runtime.engine_folder import write_config
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.decoder import Decoder
from hearth.runtime.export.dialect import GraphDialect
from hearth.runtime.export.graph import GraphBuilder
from hearth.runtime.export.model_config import ModelConfig, load_model_config
from hearth.runtime.export.onnx_files import write_onnx
from hearth.runtime.export.reference_pass import decode
from hearth.runtime.export.rounded_weights import RoundedWeights
from hearth.runtime.export.weights import Weights
from hearth.runtime.rope import rope_tables
from tests.references import reference_folder, reference_logits
from tests.runtime.export.graph_driver import GraphDriver, run_rows

TOLERANCE = 1e-4
FEATURES = 2
MROPE = RopeConfig(type="mrope", mrope_section=(6, 4, 2), mrope_interleaved=True)


def taking_images(source: Path, folder: Path, options: ExportOptions) -> ModelConfig:
    """Make an engine folder of a text model as if it took images; the model of it."""
    model = load_model_config(source)
    rope = structs.replace(MROPE, theta=model.rope.theta)
    model = structs.replace(model, rope=rope)
    config = structs.replace(
        export_model(source, folder, options),
        rope_config=rope,
        use_context_dependent_rope=True,
        image_token_id=5,
        num_deepstack_features=FEATURES,
        files={},
    )

    def build(graph: GraphBuilder, dialect: GraphDialect, weights: Weights) -> None:
        Decoder(graph, dialect, weights, deepstack=FEATURES).build()

    write_onnx(
        folder,
        model,
        config,
        Weights(Checkpoint(source), config),
        build=build,
        written=lambda _: None,
    )
    write_config(folder, config)
    return model


@pytest.fixture
def engine(tmp_path: Path, dialect: str) -> tuple[Path, ModelConfig]:
    """An engine folder and its model."""
    options = ExportOptions(dialect="native" if dialect == "native" else "classic")
    model = taking_images(reference_folder("qwen3_untied"), tmp_path / "engine", options)
    return tmp_path / "engine", model


def test_text_alone_has_the_logits_of_the_text_model(engine: tuple[Path, ModelConfig]) -> None:
    for row in reference_logits("qwen3_untied"):
        (logits,) = run_rows(GraphDriver(engine[0], 1, capacity=32), [row], 5)
        np.testing.assert_allclose(logits, row.logits, atol=TOLERANCE, rtol=0)


def test_rows_turn_by_their_own_tables_and_add_their_own_features(
    engine: tuple[Path, ModelConfig],
) -> None:
    folder, model = engine
    random = np.random.default_rng(7)
    ids = random.integers(0, model.vocab_size, (3, 9))
    turns = random.uniform(0, 20, (3, 32, model.rotary_dim // 2)).astype(np.float32)
    features = random.normal(0, 1, (FEATURES, 3, 9, model.hidden_size)).astype(np.float32)
    driver = GraphDriver(folder, 3, capacity=32)
    driver.rope = {"rope_cos": np.cos(turns), "rope_sin": np.sin(turns)}
    seen = []
    for start in range(0, 9, 4):
        piece = slice(start, start + 4)
        count = len(ids[0, piece])
        steps = np.tile(np.arange(count), (3, 1))
        more = {f"deepstack_embeds_{k}": one[:, piece] for k, one in enumerate(features)}
        driver.outputs = driver.run(ids[:, piece], steps + driver.filled[:, None], steps, **more)
        driver.commit([count] * 3)
        seen.append(driver.outputs["logits"])
    own = turns[:, None, :9]
    weights = RoundedWeights(Checkpoint(reference_folder("qwen3_untied")), driver.config)
    embeds: NDArray[np.float32] = driver.table[ids].astype(np.float32)
    expected = decode(model, weights, embeds, (np.cos(own), np.sin(own)), list(features))
    np.testing.assert_allclose(np.concatenate(seen, axis=1), expected, atol=TOLERANCE, rtol=0)
    plain = rope_tables(model.rope, model.rotary_dim, 9)
    assert np.abs(decode(model, weights, embeds, plain, list(features)) - expected).max() > 0.1

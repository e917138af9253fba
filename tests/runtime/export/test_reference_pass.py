import numpy as np
import pytest

from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.engine_files import engine_config
from hearth.runtime.export.model_config import load_model_config
from hearth.runtime.export.options import ExportOptions
from hearth.runtime.export.reference_pass import reference_logits
from hearth.runtime.export.rounded_weights import RoundedWeights
from tests.references import NAMES, reference_folder
from tests.references import reference_logits as stored_logits


@pytest.mark.parametrize("name", NAMES)
def test_the_pass_gives_the_logits_of_the_reference(name: str) -> None:
    folder = reference_folder(name)
    model = load_model_config(folder)
    weights = RoundedWeights(Checkpoint(folder), engine_config(model, ExportOptions()))
    for row in stored_logits(name):
        logits = reference_logits(model, weights, row.token_ids)
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, row.logits, rtol=0, atol=1e-4)

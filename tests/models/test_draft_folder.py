import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hearth.runtime.export.draft_config import load_draft_config  # noqa: E402 - behind the skip above
from hearth.runtime.export.model_config import load_model_config  # noqa: E402 - behind the skip above
from models.draft_base import Base  # noqa: E402 - needs torch
from models.draft_folder import config_of, read_draft, write_draft  # noqa: E402 - likewise
from models.draft_model import TAPS, Draft, DraftShape  # noqa: E402 - likewise
from models.train_draft import new_draft  # noqa: E402 - likewise

HOME = Path(__file__).parents[2] / "models" / "home"


def test_a_draft_comes_back_as_it_was_written_in_bfloat16(tmp_path: Path) -> None:
    shape = DraftShape(hidden=16, heads=4, kv_heads=1, head_dim=8, intermediate=24, vocabulary=32)
    draft = Draft(shape)
    write_draft(tmp_path, draft)
    back = read_draft(tmp_path)
    assert back.shape == shape
    for name, value in draft.state_dict().items():
        assert back.state_dict()[name].equal(value.bfloat16().float()), name


def test_the_configuration_is_the_published_form_and_fits_the_base() -> None:
    config, base = config_of(DraftShape()), json.loads((HOME / "config.json").read_text("utf-8"))
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["target_layer_ids"] == [1, 5, 8]  # by their outputs
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 5, 8]
    assert config["draft_vocab_size"] == base["vocab_size"]
    shared = ("hidden_size", "head_dim", "rope_theta", "rms_norm_eps", "max_position_embeddings")
    assert {key: config[key] for key in shared} == {key: base[key] for key in shared}


def test_the_exporter_reads_the_taps_and_sizes_that_were_trained(tmp_path: Path) -> None:
    write_draft(tmp_path, Draft(DraftShape()))
    config = load_draft_config(tmp_path, load_model_config(HOME))
    assert config.taps == TAPS
    assert config.vocab_size == DraftShape().vocabulary
    assert (config.model.num_attention_heads, config.model.num_kv_heads) == (8, 4)


def test_the_taps_are_the_inputs_of_the_tapped_layers() -> None:
    base = Base(HOME, "cpu")
    ids = torch.randint(3, 1000, (2, 9))
    reading = base.read(ids)
    whole = base.model(input_ids=ids, output_hidden_states=True)
    assert TAPS == (2, 12 // 2, 12 - 3)
    wanted = torch.cat([whole.hidden_states[layer] for layer in TAPS], -1)
    assert reading.taps.allclose(wanted, atol=1e-5)
    assert reading.logits.allclose(whole.logits, atol=1e-4)


def test_a_new_draft_passes_the_highest_tap_to_the_bases_head() -> None:
    base = Base(HOME, "cpu")
    draft, taps = new_draft(base, DraftShape()), torch.randn(1, 3, 3 * 192)
    assert draft.fused(taps).allclose(taps[..., 2 * 192 :], atol=1e-6)
    assert draft.lm_head.weight.equal(base.embedding)
    assert all(parameter.requires_grad for parameter in draft.parameters())

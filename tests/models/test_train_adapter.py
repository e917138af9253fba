from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models.merge_adapter import config_of, merged  # noqa: E402 - behind the skip above
from models.rewordings import BASE, ROWS, adapter_batches, spoken  # noqa: E402 - behind the skip above  # noqa: E402 - behind the skip above
from models.train_adapter import attach, rate_at, train, write_adapter  # noqa: E402 - behind the skip above  # noqa: E402 - behind the skip above


def test_an_adapter_begins_as_nothing_and_merges_as_it_computes(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(4, 3, bias=False)})
    model["up_proj"] = torch.nn.Linear(4, 3)
    x = torch.randn(2, 4)
    before = model["q_proj"](x)
    weights = {"model.q_proj.weight": model["q_proj"].weight.detach().numpy().copy()}
    adapters = attach(model, 2, 4.0, ("q_proj",))
    assert torch.equal(model["q_proj"](x), before)
    assert [name for name, one in model.named_parameters() if one.requires_grad] == [
        "q_proj.lora_A",
        "q_proj.lora_B",
    ]
    # Numbers that bfloat16 has.
    adapters["q_proj"].lora_A.data = torch.tensor([[1.0, 0.5, 0, 0], [0, 0, -0.25, 2]])
    adapters["q_proj"].lora_B.data = torch.tensor([[1.0, 0], [0, 1], [0.5, 0.5]])
    named = {f"model.{name}": one for name, one in adapters.items()}
    write_adapter(tmp_path, named, config_of("tiny", 2, 4.0, ("q_proj",)))
    whole = merged(weights, tmp_path)["model.q_proj.weight"]
    expected = model["q_proj"](x).detach().numpy()
    assert np.allclose(x.numpy() @ whole.T, expected, atol=1e-6)
    assert not np.allclose(expected, before.detach().numpy(), atol=0.1)
    assert list(load_file(tmp_path / "adapter_model.safetensors")) == [
        "base_model.model.model.q_proj.lora_A.weight",
        "base_model.model.model.q_proj.lora_B.weight",
    ]


def test_the_rate_rises_and_falls() -> None:
    assert rate_at(0, 100, 1.0) == pytest.approx(0.05)
    assert rate_at(20, 100, 1.0) > rate_at(50, 100, 1.0) > rate_at(99, 100, 1.0)


def test_a_few_steps_change_an_adapter_and_the_seed_alone_says_how(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("models.rewordings.POOL", 1)
    monkeypatch.setattr("models.rewordings.ROWS", 2)
    found = [train(spoken, 2, 1e-2, seed=1)["model.layers.3.self_attn.v_proj"] for _ in range(2)]
    assert found[0].lora_B.abs().max() > 0
    assert torch.equal(found[0].lora_B, found[1].lora_B)


def test_batches_are_of_rows_of_like_length_from_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.rewordings.POOL", 2)
    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    first, again = (list(islice(adapter_batches(tokenizer, spoken, 5), 3)) for _ in range(2))
    assert all(np.array_equal(one.ids, two.ids) for one, two in zip(first, again, strict=True))
    assert {len(one.ids) for one in first} == {ROWS}
    assert all(one.answers.any(axis=1).all() for one in first)


def test_loss_is_that_of_the_answers_alone() -> None:
    from models.folder import new_model  # noqa: PLC0415 - needs torch
    from models.train import loss_of  # noqa: PLC0415 - needs torch

    torch.manual_seed(0)
    model = new_model()
    ids = torch.randint(3, 1000, (2, 12))
    answers = torch.zeros_like(ids, dtype=torch.bool)
    answers[:, 5:8] = True
    logits = model(input_ids=ids).logits[:, 4:7].reshape(-1, 1024)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 5:8].reshape(-1))
    assert loss_of(model, ids, answers).item() == pytest.approx(expected.item(), rel=1e-4)

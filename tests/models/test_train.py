import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


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

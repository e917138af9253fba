"""Training: `python -m models.train --out models/home`."""

import os
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from models.folder import new_model, write_folder
from models.tokenizer import train_tokenizer
from models.training import Defaults, Settings, optimizer_of, scheduled, settings_of, training_flags

DEFAULTS: Final = Defaults(Path("models/home"), 65536, 6144, 3e-3, seed=0)


def loss_of(model: Qwen3ForCausalLM, ids: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over the answers' tokens, the only ones that are projected."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    wanted = answers[:, 1:]
    logits = model.lm_head(hidden[:, :-1][wanted])
    return torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:][wanted])


def _step(
    model: Qwen3ForCausalLM, optimizer: torch.optim.AdamW, batch: list[torch.Tensor], device: str
) -> torch.Tensor:
    ids, answers = (part.to(device, non_blocking=True) for part in batch)
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        loss = loss_of(model, ids, answers)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def _prepare_gpu(model: Qwen3ForCausalLM) -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for each shape of a batch
    for layer in model.model.layers:  # one by one: they share one compiled graph
        layer.compile(dynamic=True)


def train(settings: Settings, tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """Return a model trained from scratch."""
    torch.manual_seed(settings.seed)
    model = new_model().to(settings.device)
    if settings.device == "cuda":
        _prepare_gpu(model)
    optimizer = optimizer_of(model, settings.rate, 0.1)
    for taken in scheduled(settings, tokenizer, optimizer):
        loss = _step(model, optimizer, taken.batch, settings.device)
        if taken.step % 100 == 0:
            print(
                f"step {taken.step} loss {loss.item():.4f} tokens {taken.tokens} "
                f"seconds {taken.seconds:.0f}",
                flush=True,
            )
    return model


def main() -> None:
    """Train the tokenizer and the model, and write the model folder."""
    settings = settings_of(training_flags(__doc__, DEFAULTS).parse_args(), DEFAULTS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = train_tokenizer(settings.seed)
    model = train(settings, tokenizer)
    write_folder(settings.out, model, tokenizer)


if __name__ == "__main__":
    main()

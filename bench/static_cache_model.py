"""`transformers` with a static cache as a contender, eager or compiled by PyTorch."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers

from bench.worker_messages import Job

_COMPILE_STEPS = 4
"""The compiler records its graph in the second or third call."""


class StaticCacheModel:
    """A causal language model whose cache has `job.capacity` slots, decoding `job.batch` rows.

    "torch_compile" compiles the whole step with `mode="reduce-overhead"`, so that it runs as one
    CUDA graph; the choice of the token is part of the step. Like Hearth it hands each token to
    the next step on the device, and the host reads all of them.
    """

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.precision = job.precision
        self._prompt = torch.tensor([job.prompt] * job.batch, device=job.device)
        self._model = _load(job)
        self._cache = transformers.StaticCache(self._model.config, max_cache_len=job.capacity)
        self._takes_slots = "cache_position" in inspect.signature(self._model.forward).parameters
        self._last: Any = None
        self._position: Any = None
        self._step: Callable[..., Any] = self._choose
        with torch.inference_mode():
            self.first = self._prefill()
            if job.contender == "torch_compile":
                self._compile()

    def step(self) -> int:
        """One forward pass for the last token of every row; the token of the first row."""
        with torch.inference_mode():
            self._last = self._step(self._last, self._position).clone()
            self._position += 1
            return int(self._last.tolist()[0][0])

    def _compile(self) -> None:
        self._step = torch.compile(self._choose, mode="reduce-overhead", fullgraph=True)
        for _ in range(_COMPILE_STEPS):
            self.step()
        self._cache.reset()
        self.first = self._prefill()

    def _prefill(self) -> int:
        length = self._prompt.shape[1]
        positions = torch.arange(length, device=self._prompt.device)[None]
        self._last = self._choose(self._prompt, positions)
        self._position = torch.tensor([[length]], device=self._prompt.device)
        return int(self._last[0, 0])

    def _choose(self, token_ids: Any, positions: Any) -> Any:
        slots = {"cache_position": positions[0]} if self._takes_slots else {}
        answer = self._model(
            token_ids,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
            **slots,
        )
        return answer.logits[:, -1].argmax(-1, keepdim=True)


def _load(job: Job) -> Any:
    dtype = getattr(torch, job.precision)
    model = transformers.AutoModelForCausalLM.from_pretrained(job.path, dtype=dtype)
    return model.eval().to(job.device)

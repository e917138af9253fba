"""`transformers` as a contender, at a given precision or at the fastest on this CPU."""

import time
import warnings
from typing import Any

import torch
import transformers

from bench.worker_messages import Job

PRECISIONS = ("float32", "bfloat16", "float16", "int8")
"""`int8` is float32 with the linear layers quantised dynamically by PyTorch."""
_TRIALS = 4
_HOPELESS = 3.0


class TransformersModel:
    """A causal language model of `transformers` with its own cache, decoding greedily."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.precision = job.precision or fastest_precision(job)
        self._model = _load(job.path, self.precision)
        self._cache: Any = None
        self.first = self._forward(job.prompt)

    def step(self) -> int:
        """One forward pass for the last token."""
        return self._forward([self._last])

    def _forward(self, token_ids: list[int]) -> int:
        with torch.inference_mode():
            answer = self._model(
                torch.tensor([token_ids]),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
            self._cache = answer.past_key_values
            self._last = int(answer.logits[0, -1].argmax())
        return self._last


def fastest_precision(job: Job) -> str:
    """Try every precision for a few steps; one that starts hopelessly slow is dropped at once."""
    best, fastest = float("inf"), PRECISIONS[0]
    for precision in PRECISIONS:
        model = TransformersModel(
            Job(
                contender=job.contender,
                path=job.path,
                threads=job.threads,
                prompt=job.prompt,
                precision=precision,
            )
        )
        seconds = _trial(model, best)
        if seconds < best:
            best, fastest = seconds, precision
    return fastest


def _trial(model: TransformersModel, best: float) -> float:
    seconds = float("inf")
    for _ in range(_TRIALS):
        started = time.perf_counter()
        model.step()
        seconds = min(seconds, time.perf_counter() - started)
        if seconds > _HOPELESS * best:
            break
    return seconds


def _load(path: str, precision: str) -> Any:
    dtype = torch.float32 if precision == "int8" else getattr(torch, precision)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    if precision != "int8":
        return model
    with warnings.catch_warnings():
        # PyTorch announces a successor in another package; this one needs no further install.
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)

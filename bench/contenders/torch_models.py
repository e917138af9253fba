"""`transformers` as a contender: with its own cache on the CPU, or with a static one."""

import inspect
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from msgspec import structs
from transformers.modeling_outputs import CausalLMOutputWithPast

from hearth.bench.contenders.contender import Contender, Job

PRECISIONS = ("float32", "bfloat16", "float16", "int8")
"""`int8` is float32 with the linear layers quantised dynamically by PyTorch."""
_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__annotations__ else "past_key_values"
"""Name of the cache among the arguments and in the answer of a model."""
_TRIALS = 4
_HOPELESS = 3.0
_COMPILE_STEPS = 4
"""The compiler records its graph in the second or third call."""


class TransformersModel(Contender):
    """A causal language model of `transformers` with its own cache.

    At the job's precision, or at the fastest on this CPU.
    """

    def __init__(self, job: Job) -> None:
        _be_quiet(job)
        self.precision = job.precision or fastest_precision(job)
        self._model = _load(job, "float32" if self.precision == "int8" else self.precision)
        if self.precision == "int8":
            self._model = _quantised(self._model)
        self._prompt = job.prompt
        self._cache: Any = None

    def prefill(self) -> int:
        """One forward pass for the prompt."""
        return self._forward(self._prompt)

    def step(self) -> int:
        """One forward pass for the last token."""
        return self._forward([self._last])

    def _forward(self, token_ids: list[int]) -> int:
        with torch.inference_mode():
            answer = self._model(
                torch.tensor([token_ids]),
                **{_CACHE: self._cache},
                use_cache=True,
                logits_to_keep=1,
            )
            self._cache = answer[_CACHE]
            self._last = int(answer.logits[0, -1].argmax())
        return self._last


def fastest_precision(job: Job) -> str:
    """Try every precision for a few steps; one that starts hopelessly slow is dropped at once."""
    best, fastest = float("inf"), PRECISIONS[0]
    for precision in PRECISIONS:
        model = TransformersModel(structs.replace(job, precision=precision))
        model.prefill()
        seconds = _trial(model, best)
        if seconds < best:
            best, fastest = seconds, precision
    return fastest


def _trial(model: Contender, best: float) -> float:
    seconds = float("inf")
    for _ in range(_TRIALS):
        started = time.perf_counter()
        model.step()
        seconds = min(seconds, time.perf_counter() - started)
        if seconds > _HOPELESS * best:
            break
    return seconds


class StaticCacheModel(Contender):
    """A causal language model whose cache has `job.capacity` slots, decoding `job.batch` rows.

    "torch_compile" compiles the whole step with `mode="reduce-overhead"`, so that it runs as one
    CUDA graph; the choice of the token is part of the step. Like Hearth it hands each token to
    the next step on the device, and the host reads all of them.
    """

    def __init__(self, job: Job) -> None:
        _be_quiet(job)
        self.precision = job.precision
        self._compiles = job.contender == "torch_compile"
        self._prompt = torch.tensor([job.prompt] * job.batch, device=job.device)
        self._model = _load(job, job.precision)
        self._cache = transformers.StaticCache(self._model.config, max_cache_len=job.capacity)
        self._takes_slots = "cache_position" in inspect.signature(self._model.forward).parameters
        self._last: Any = None
        self._position: Any = None
        self._step: Callable[..., Any] = self._choose

    def prefill(self) -> int:
        """One forward pass for the prompt of all rows; compiles the step where that is asked."""
        first = self._prefill()
        if self._compiles:
            self._step = torch.compile(self._choose, mode="reduce-overhead", fullgraph=True)
            for _ in range(_COMPILE_STEPS):
                self.step()
            with torch.inference_mode():
                self._cache.reset()
            first = self._prefill()
        return first

    def step(self) -> int:
        """One forward pass for the last token of every row; the token of the first row."""
        with torch.inference_mode():
            self._last = self._step(self._last, self._position).clone()
            self._position += 1
            return int(self._last.tolist()[0][0])

    def _prefill(self) -> int:
        length = self._prompt.shape[1]
        with torch.inference_mode():
            positions = torch.arange(length, device=self._prompt.device)[None]
            self._last = self._choose(self._prompt, positions)
            self._position = torch.tensor([[length]], device=self._prompt.device)
            return int(self._last[0, 0])

    def _choose(self, token_ids: Any, positions: Any) -> Any:
        slots = {"cache_position": positions[0]} if self._takes_slots else {}
        answer = self._model(
            token_ids,
            position_ids=positions,
            **{_CACHE: self._cache},
            use_cache=True,
            logits_to_keep=1,
            **slots,
        )
        return answer.logits[:, -1].argmax(-1, keepdim=True)


def _be_quiet(job: Job) -> None:
    torch.set_num_threads(job.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _load(job: Job, dtype: str) -> Any:
    """The model of a folder, or one of random weights where it has a configuration alone."""
    kind, wanted = transformers.AutoModelForCausalLM, getattr(torch, dtype)
    if any(Path(job.path).glob("*.safetensors")):
        return kind.from_pretrained(job.path, dtype=wanted).eval().to(job.device)
    config = transformers.AutoConfig.from_pretrained(job.path)
    with torch.device(job.device):
        return kind.from_config(config, dtype=wanted).eval()


def _quantised(model: Any) -> Any:
    with warnings.catch_warnings():
        # PyTorch announces a successor in another package; this one needs no further install.
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)

"""`llama.cpp` as a contender, through the low-level bindings of llama-cpp-python."""

from collections.abc import Sequence
from typing import NamedTuple

import llama_cpp
import numpy as np

from hearth.bench.contenders.contender import Contender, Job
from hearth.runtime.errors import HearthError

_ALL_LAYERS = 999


class _Token(NamedTuple):
    """A token of a row at a position; with `answers` the model says what comes behind it."""

    row: int
    position: int
    token_id: int
    answers: bool


class LlamaCppModel(Contender):
    """A GGUF file in llama.cpp with its defaults, decoding `job.batch` rows greedily.

    On a GPU all layers are there, and the cache has `job.capacity` slots a row. llama.cpp copies
    the logits of each step to the host, where the tokens are chosen.
    """

    def __init__(self, job: Job) -> None:
        llama_cpp.llama_backend_init()
        if job.device == "cuda" and not llama_cpp.llama_supports_gpu_offload():
            raise HearthError("engine_incompatible", "this llama.cpp was built for a CPU", "device")
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = _ALL_LAYERS if job.device == "cuda" else 0
        self._model = llama_cpp.llama_model_load_from_file(job.path.encode(), parameters)
        if not self._model:
            raise HearthError("model_invalid", f"llama.cpp cannot load {job.path}", "path")
        self._context = llama_cpp.llama_init_from_model(self._model, _context_parameters(job))
        if not self._context:
            raise HearthError("engine_incompatible", "llama.cpp has no room for the cache", "path")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._batch = llama_cpp.llama_batch_init(max(job.batch, len(job.prompt)), 0, 1)
        self._prompt, self._rows = job.prompt, range(job.batch)
        self._length, self._last = len(job.prompt), list[int]()

    def prefill(self) -> int:
        """Decode the whole prompt of every row, one row after the other."""
        last = self._length - 1
        for row in self._rows:
            tokens = enumerate(self._prompt)
            self._last += self._decode([_Token(row, at, one, at == last) for at, one in tokens])
        return self._last[0]

    def step(self) -> int:
        """Decode the last token of every row."""
        tokens = zip(self._rows, self._last, strict=True)
        self._last = self._decode([_Token(row, self._length, one, True) for row, one in tokens])
        self._length += 1
        return self._last[0]

    def _decode(self, tokens: Sequence[_Token]) -> list[int]:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index], batch.pos[index] = token.token_id, token.position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, token.row
            batch.logits[index] = token.answers
        if llama_cpp.llama_decode(self._context, batch):
            raise HearthError("internal", "llama.cpp refused to decode")
        return [self._choice(index) for index, token in enumerate(tokens) if token.answers]

    def _choice(self, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())


def _context_parameters(job: Job) -> llama_cpp.llama_context_params:
    parameters = llama_cpp.llama_context_default_params()
    # llama.cpp rounds up to its own block; as much room as the steps need, as for the others.
    slots = job.capacity or len(job.prompt) + job.steps + 1
    parameters.n_ctx, parameters.n_seq_max = slots * job.batch, job.batch
    parameters.n_threads = parameters.n_threads_batch = job.threads
    return parameters

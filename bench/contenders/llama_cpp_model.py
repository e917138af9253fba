"""`llama.cpp` as a contender, through the low-level bindings of llama-cpp-python."""

import llama_cpp
import numpy as np

from bench.contenders.contender import Contender, Job
from runtime.errors import HearthError


class LlamaCppModel(Contender):
    """A GGUF file in llama.cpp on the CPU with its defaults, decoding greedily."""

    def __init__(self, job: Job) -> None:
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(job.path.encode(), parameters)
        if not self._model:
            raise HearthError("model_invalid", f"llama.cpp cannot load {job.path}", "path")
        self._context = llama_cpp.llama_init_from_model(self._model, _context_parameters(job))
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._prompt = job.prompt

    def prefill(self) -> int:
        """Decode the whole prompt."""
        return self._decode(self._prompt)

    def step(self) -> int:
        """Decode the last token."""
        return self._decode([self._last])

    def _decode(self, token_ids: list[int]) -> int:
        tokens = (llama_cpp.llama_token * len(token_ids))(*token_ids)
        batch = llama_cpp.llama_batch_get_one(tokens, len(token_ids))
        if llama_cpp.llama_decode(self._context, batch):
            raise HearthError("internal", "llama.cpp refused to decode")
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        self._last = int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())
        return self._last


def _context_parameters(job: Job) -> llama_cpp.llama_context_params:
    parameters = llama_cpp.llama_context_default_params()
    # llama.cpp rounds up to its own block; as much room as the steps need, as for the others.
    parameters.n_ctx = len(job.prompt) + job.steps + 1
    parameters.n_threads = parameters.n_threads_batch = job.threads
    return parameters

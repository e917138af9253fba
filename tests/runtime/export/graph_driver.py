"""The smallest loop that can serve an engine folder: enough to compare a graph with references."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from hearth.runtime.config import DRAFT_ARCHITECTURE, LLMEngineRunnerConfig, load_config
from hearth.runtime.engine_folder import EMBEDDING_FILE, MODEL_FILE, ROPE_FILE
from tests.low_rank_models import engine_inputs
from tests.references import ReferenceRow

Array = NDArray[Any]


def open_session(folder: Path, *, accuracy_level: int = 0) -> Any:
    """A session on the engine's graph; level 0 computes quantised weights exactly."""
    import onnxruntime as ort  # noqa: PLC0415 - an engine of kernels is driven without it

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", str(accuracy_level))
    return ort.InferenceSession(folder / MODEL_FILE, options, providers=["CPUExecutionProvider"])


class GraphDriver:
    """Runs steps over a batch; `filled` holds the slots in use of each row.

    `aliased` binds native output caches to the memory of their inputs, as they are meant to be.
    `rope` are the rotary tables; where each row has its own they begin as those of text. `adapter`
    is what the inputs of adapters are bound to, rank 0 to begin with.
    """

    def __init__(self, folder: Path, batch: int, capacity: int) -> None:
        self.config: LLMEngineRunnerConfig = load_config(folder)
        self.session = self._open(folder)
        self.filled = np.zeros(batch, np.int64)
        self.aliased = True
        self._native = self.config.dialect == "native"
        base = folder.parent if self.config.architecture == DRAFT_ARCHITECTURE else folder
        self.table = self._table(base)
        self.outputs: dict[str, Array] = {}
        rope = load_file(folder / ROPE_FILE)
        self.rope = {"rope_cos": rope["cos"], "rope_sin": rope["sin"]}
        if self.config.use_context_dependent_rope:
            self.rope = {name: np.stack([table] * batch) for name, table in self.rope.items()}
        self.adapter = engine_inputs(self.config, {})
        shape = (batch, self.config.num_kv_heads, capacity, self.config.head_dim)
        self.caches = {
            f"{kind}_cache_{layer}": np.zeros(shape, self.config.kv_cache_dtype)
            for layer in range(self.config.num_decoder_layers)
            for kind in "kv"
        }

    def step(self, rows: Sequence[Sequence[int]]) -> list[Array]:
        """Feed each row its next tokens (right-padded with 0); logits [tokens, V] of each row."""
        width = max(map(len, rows))
        logits = self.logits(rows, np.tile(np.arange(width), (len(rows), 1)))
        return [logits[row, : len(tokens)] for row, tokens in enumerate(rows)]

    def logits(self, rows: Sequence[Sequence[int]], selected: Array) -> Array:
        """Feed each row its next tokens; logits [B, M, V] of those `selected` [B, M]."""
        ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
        positions = np.zeros_like(ids)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = tokens
            positions[row, : len(tokens)] = self.filled[row] + np.arange(len(tokens))
        self.outputs = self.run(ids, positions, selected)
        self.commit([len(tokens) for tokens in rows])
        return self.outputs["logits"]

    def run(
        self,
        ids: Array,
        positions: Array,
        selected: Array,
        mask: Array | None = None,
        **more: Array,
    ) -> dict[str, Array]:
        """All outputs of a step of `ids` [B, S] behind the filled slots, which stay as they are.

        `mask` [B, S, S] is causal unless given; `more` are further inputs.
        """
        index = np.int64 if self._native else np.int32
        feeds = {
            "inputs_embeds": self.table[ids].astype(self.config.dtype),
            "kvcache_start_index": self.filled.astype(index),
            "attention_pos_id": positions.astype(index),
            "last_token_ids": selected.astype(index),
            **{
                f"deepstack_embeds_{feature}": np.zeros(
                    (*ids.shape, self.config.hidden_size), self.config.dtype
                )
                for feature in range(self.config.num_deepstack_features)
            },
            **{name: array.astype(self.config.dtype) for name, array in more.items()},
            **self.rope,
            **self.adapter,
        }
        if self.config.takes_tree_mask:
            causal = np.tile(np.tri(ids.shape[1], dtype=np.bool_), (len(ids), 1, 1))
            feeds["tree_mask"] = causal if mask is None else mask
        return self._run(feeds)

    def commit(self, lengths: Sequence[int]) -> None:
        """Count the first `lengths` tokens of the last step as filled slots."""
        if not self._native:
            self._write_rows(self.outputs, lengths)
        self.filled += lengths

    def keep(self, rows: Sequence[int]) -> None:
        """Evict all rows but these, whose caches move to the front."""
        self.filled = self.filled[list(rows)]
        self.caches = {name: cache[list(rows)].copy() for name, cache in self.caches.items()}
        if self.config.use_context_dependent_rope:
            self.rope = {name: table[list(rows)].copy() for name, table in self.rope.items()}

    def _table(self, base: Path) -> Array:
        table: Array = load_file(base / EMBEDDING_FILE)["embedding"]
        return table

    def _open(self, folder: Path) -> Any:
        return open_session(folder)

    def _run(self, feeds: dict[str, Array]) -> dict[str, Array]:
        import onnxruntime as ort  # noqa: PLC0415 - see `open_session`

        binding = self.session.io_binding()
        for name, array in (feeds | self.caches).items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        names = [output.name for output in self.session.get_outputs()]
        for name in names:
            cache = self.caches.get(name.removeprefix("present_"))
            if self._native and self.aliased and cache is not None:
                binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(cache))
            else:
                binding.bind_output(name)
        self.session.run_with_iobinding(binding)
        return dict(zip(names, (out.numpy() for out in binding.get_outputs()), strict=True))

    def _write_rows(self, outputs: dict[str, Array], lengths: Sequence[int]) -> None:
        for name, cache in self.caches.items():
            rows = outputs[f"present_{name}"]
            for row, length in enumerate(lengths):
                start = int(self.filled[row])
                cache[row, :, start : start + length] = rows[row, :, :length]


def run_rows(driver: GraphDriver, rows: Sequence[ReferenceRow], chunk: int) -> list[Array]:
    """Feed reference rows, prompts by chunks and then token by token; logits [T, V] of each.

    A row that is through is evicted while the others go on.
    """
    seen: list[list[Array]] = [[] for _ in rows]
    fed = [0] * len(rows)
    live = list(range(len(rows)))
    while live:
        pieces = []
        for row in live:
            prompt_left = rows[row].prompt_length - fed[row]
            pieces.append(rows[row].token_ids[fed[row] :][: min(chunk, max(prompt_left, 1))])
        for row, piece, logits in zip(live, pieces, driver.step(pieces), strict=True):
            seen[row].append(logits)
            fed[row] += len(piece)
        kept = [row for row in live if fed[row] < len(rows[row].token_ids)]
        driver.keep([live.index(row) for row in kept])
        live = kept
    return [np.concatenate(parts) for parts in seen]

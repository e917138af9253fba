"""Raw launches of one engine's steps: of one token, of token trees and of a chunk of prompt."""

import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
from msgspec import structs

from runtime.config import LLMEngineRunnerConfig
from runtime.decoding.assembly import assemble
from runtime.decoding.deployment import DeploymentConfig, load_engines
from runtime.device.open import open_device
from runtime.executor.engine import EngineOptions
from runtime.loading import nobody
from runtime.options import RuntimeOptions
from runtime.steps.engine_runner import LLMEngineRunner

CONTEXT = 128
_TOKEN = 7
_WARM_UP = 3


class WidthTimes(msgspec.Struct, kw_only=True):
    """Milliseconds of a launch: a decode step, trees by their nodes, a prompt of `prompt` tokens.

    All of one row; steps and trees follow `context` tokens, the prompt follows none.
    """

    step_ms: float
    tree_ms: dict[int, float]
    prompt_ms: float
    prompt: int
    context: int = CONTEXT


class Amounts(msgspec.Struct, frozen=True, kw_only=True):
    """What is timed: `launches` back to back, `windows` times."""

    trees: tuple[int, ...] = (8, 60)
    prompt: int = 512
    windows: int = 9
    launches: int = 50


def width_times(folder: Path, amounts: Amounts) -> WidthTimes:
    """Open an engine folder and time it; raises what opening raises.

    An engine of kernels verifies trees, as it does with a draft; others, which were exported for
    none, verify chains, as lookup has them do.
    """
    found = load_engines(folder, RuntimeOptions(max_batch=1, verify=False), nobody)
    deployment = found.resolve(RuntimeOptions(max_batch=1, verify=False))
    config = _with_trees(deployment.base, amounts)
    device = open_device(config.device)
    given = DeploymentConfig(config, "off", deployment.speculation)
    runner = assemble(given, folder, EngineOptions(), device).runner
    with closing(runner):
        return _Steps(runner, amounts).times()


def _with_trees(config: LLMEngineRunnerConfig, amounts: Amounts) -> LLMEngineRunnerConfig:
    wide = structs.replace(
        config, prefill_chunk=amounts.prompt, max_verify_tree_size=max(amounts.trees)
    )
    if config.backend != "kernels":
        return wide
    layers = config.num_decoder_layers
    taps = tuple(sorted({1, layers // 2, layers - 1}))
    return structs.replace(
        wide,
        enable_eagle_spec_decode=True,
        eagle_layers=taps,
        output_hidden_dim=len(taps) * config.hidden_size,
    )


class _Steps:
    """One row's steps, each captured where its engine can be, launched again and again."""

    def __init__(self, runner: LLMEngineRunner, amounts: Amounts) -> None:
        self._runner, self._amounts = runner, amounts
        self._bindings = runner._steps  # noqa: SLF001 - nobody else has a use for these
        self._trees = runner._trees  # noqa: SLF001 - likewise
        self._device = runner._device  # noqa: SLF001 - likewise

    def times(self) -> WidthTimes:
        prompt_ms = self._prompt()
        return WidthTimes(
            prompt_ms=prompt_ms,
            prompt=self._amounts.prompt,
            step_ms=self._decode(),
            tree_ms={nodes: self._tree(nodes) for nodes in self._amounts.trees},
        )

    def _prompt(self) -> float:
        self._runner.reset(1)
        ids = np.full((1, self._amounts.prompt), _TOKEN, np.int64)
        self._runner._prepare_prefill(ids, [ids.size], 0)  # noqa: SLF001 - likewise
        self._runner.executor.capture_graph(self._bindings.stream)
        return self._launches()

    def _decode(self) -> float:
        self._fill()
        self._runner.execute_vanilla_decoding_step(1)
        # What a runner captures of steps may have more in it than the step.
        self._runner.executor.capture_graph(self._bindings.stream)
        return self._launches()

    def _tree(self, nodes: int) -> float:
        self._fill()
        ids = np.full((1, nodes), _TOKEN, np.int32)
        before = np.array([parents(nodes)], np.int32)
        self._device.tree_ops.plant(self._trees, ids, before)
        self._runner.execute_eagle_base_tree_decoding_step(1, nodes)
        self._runner.executor.capture_graph(self._bindings.stream)
        return self._launches()

    def _fill(self) -> None:
        self._runner.reset(1)
        self._runner.execute_prefill_step(np.full((1, CONTEXT), _TOKEN, np.int64), [CONTEXT])

    def _launches(self) -> float:
        stream, execute = self._bindings.stream, self._runner.executor.execute
        count, windows = self._amounts.launches, list[float]()
        for number in range(-_WARM_UP, self._amounts.windows):
            stream.synchronize()
            began = time.perf_counter()
            for _ in range(count):
                execute(stream)
            stream.synchronize()
            if number >= 0:
                windows.append(time.perf_counter() - began)
        return 1000 * median(windows) / count


def parents(nodes: int) -> Sequence[int]:
    """A tree in which each node has four children; the parent of the root is -1."""
    return [-1, *((node - 1) // 4 for node in range(1, nodes))]

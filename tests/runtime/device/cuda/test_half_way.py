"""Every call of the driver fails in turn, from opening a runtime to closing it."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.cuda import cuda_device
from hearth.runtime.device.cuda.context import CudaContext
from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.device.cuda.driver import CudaDriver
from hearth.runtime.device.cuda.graph import GraphCapture
from hearth.runtime.device.device import Device, Stream
from hearth.runtime.errors import HearthError
from hearth.runtime.executor import engine_executor
from hearth.runtime.executor.engine import Binding, CapturedRun, EngineOptions, IOTensor
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.generation.deployment import DeploymentConfig
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.request import RequestOptions, RowRequest
from hearth.runtime.tensors.registry import TensorRegistry
from hearth.runtime.tensors.tensor import Tensor
from tests.runtime.device.cuda.fake_driver import CUresult
from tests.runtime.device.cuda.resource_driver import ResourceDriver
from tests.runtime.device.cuda.test_tree_launches import NoCompiler

SMALL = simulated_config(vocab_size=97, layers=2, max_batch=4, capacity=64, prefill_chunk=16)
CONFIG = structs.replace(SMALL, device="cuda")
CODES = {
    CUresult.CUDA_ERROR_OUT_OF_MEMORY: "out_of_memory",
    CUresult.CUDA_ERROR_INVALID_VALUE: "executor_failed",
    CUresult.CUDA_ERROR_ILLEGAL_ADDRESS: "device_lost",
}


class LaunchingEngine:
    """A step is one launch; the engine must be closed before the context goes."""

    required_context_memory = 64

    def __init__(self, registry: TensorRegistry, device: Device, api: ResourceDriver) -> None:
        assert isinstance(device, CudaDevice)
        self.io_tensors = tuple(
            IOTensor(spec.name, spec.direction, spec.dtype, spec.shape) for spec in registry.specs
        )
        self._context, self._api = device.context, api
        self._number = api.give("engine")

    def use_profile(self, _profile: int, _stream: Stream) -> None:
        pass

    def set_context_memory(self, _memory: Tensor) -> None:
        pass

    def run(self, _bindings: Sequence[Binding], stream: Stream) -> None:
        self._context.driver.call("cuLaunchKernel", *[0] * 8, stream.handle)

    def capture(self, bindings: Sequence[Binding], stream: Stream) -> CapturedRun:
        self.run(bindings, stream)
        with GraphCapture(self._context, stream) as capture:  # type: ignore[arg-type] # it is ours
            self.run(bindings, stream)
        return capture.graph

    def close(self) -> None:
        self._api.take("engine", self._number)


class Life:
    """One runtime from its opening to its end; `error` is what it raised on the way."""

    def __init__(self, api: ResourceDriver, monkeypatch: pytest.MonkeyPatch) -> None:
        def open_engine(
            _folder: Path,
            _config: LLMEngineRunnerConfig,
            _options: EngineOptions,
            device: Device,
            registry: TensorRegistry,
            **_: object,
        ) -> LaunchingEngine:
            return LaunchingEngine(registry, device, api)

        monkeypatch.setattr(engine_executor, "_open_engine", open_engine)
        monkeypatch.setattr(cuda_device, "open_context", lambda _: CudaContext(CudaDriver(api)))
        monkeypatch.setattr(cuda_device, "KernelCompiler", lambda *_: NoCompiler())
        monkeypatch.setattr(cuda_device, "load_compiler_api", lambda: None)
        # To zero the slots of a real one takes longer than all calls together.
        monkeypatch.setattr(cuda_device, "_LOADING_BYTES", 4096)
        self.runtime: LLMInferenceRuntime | None = None
        self.error: HearthError | None = None
        try:
            self._live()
        except HearthError as error:
            self.error = error

    def batch(self) -> None:
        assert self.runtime is not None
        numbers = self.runtime.admit(
            [
                row(20, 4),
                row(5, 1, RequestOptions(temperature=1.0, seed=1)),
                row(3, 9, RequestOptions(repetition_penalty=1.2, logit_bias=((5, 1.0),))),
                row(2, 6),
            ]
        )
        for step in range(1000):
            if step == 4:
                self.runtime.leave(3)
            if not self.runtime.active:
                break
            failure = self.runtime.step().failure
            if failure is not None:
                # Its rows are lost, and so that the next batch finds places the others go.
                for number in numbers:
                    self.runtime.leave(number)
                raise failure

    def _live(self) -> None:
        folder, options = Path(), EngineOptions()
        self.runtime = LLMInferenceRuntime.create(DeploymentConfig(CONFIG), folder, options)
        self.runtime.capture([1, 2, 3, 4])
        self.batch()
        self.batch()


def row(length: int, tokens: int, sampling: RequestOptions | None = None) -> RowRequest:
    return RowRequest(
        token_ids=list(range(3, 3 + length)),
        prompt_length=length,
        options=structs.replace(sampling or RequestOptions(), max_tokens=tokens, ignore_eos=True),
    )


def close(life: Life, api: ResourceDriver) -> None:
    """Close the runtime, which may raise only what the driver says here for the first time."""
    known, raised = api.failed is not None, None
    try:
        if life.runtime is not None:
            life.runtime.close()
    except HearthError as error:
        raised = error
    if raised is not None:
        assert not known
        assert str(api.failed) in raised.message
        assert raised.code != "device_lost"
    assert api.misuse == [], (api.failed, api.misuse)
    if not api.lost:
        assert api.alive == {}, (api.failed, api.count)
    assert "engine" not in {kind for kind, _ in api.alive}


def check_error(life: Life, api: ResourceDriver, code: str) -> None:
    error = life.error
    if error is None:
        # An ordinary run took the place of the graph.
        assert life.runtime is not None
        counters = life.runtime.counters
        assert api.failed == "cuGraphLaunch" or counters.failed_captures == 1
        assert counters.failed_captures == 0 or str(api.failed) in counters.failure
        return
    assert error.code == code
    assert error.field == "capacity" or str(api.failed) in error.message


@pytest.mark.parametrize("status", CODES)
def test_whatever_fails_is_named_and_all_is_given_back_once(
    status: CUresult, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ResourceDriver()
    life = Life(whole, monkeypatch)
    assert life.error is None
    close(life, whole)
    for failing_call in range(1, whole.count + 1):
        api = ResourceDriver(failing_call, status)
        life = Life(api, monkeypatch)
        if api.failed is not None:
            check_error(life, api, CODES[status])
        if life.error is not None and life.runtime is not None and not api.lost:
            life.batch()
        close(life, api)
        assert api.failed is not None

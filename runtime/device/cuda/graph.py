from contextlib import ExitStack
from typing import Any

from hearth.runtime.device.cuda.context import CudaContext
from hearth.runtime.device.cuda.driver import CudaDriver
from hearth.runtime.device.cuda.stream import CudaStream
from hearth.runtime.device.device import Stream
from hearth.runtime.errors import HearthError
from hearth.runtime.undo import undoing


class CudaGraph:
    """A graph of captured work, queued by one launch; `close` frees it."""

    def __init__(self, driver: CudaDriver, graph: Any) -> None:
        self._driver = driver
        self._graph = graph
        self._run = driver.function("cuGraphLaunch")
        self._native = driver.call("cuGraphInstantiate", graph, 0)

    def launch(self, stream: Stream, /) -> None:
        """Queue the work on `stream`; raises CUDA's error."""
        native = stream.native if isinstance(stream, CudaStream) else stream.handle
        (status,) = self._run(self._native, native)
        if status:
            raise self._driver.failure("cuGraphLaunch", status)

    @property
    def nodes(self) -> int:
        """Number of captured nodes: kernels, copies and others."""
        _, count = self._driver.call("cuGraphGetNodes", self._graph, 0)
        return int(count)

    def close(self) -> None:
        """Free the graph; calling it twice is harmless."""
        if self._native is not None:
            native, self._native = self._native, None
            with ExitStack() as closing:
                closing.callback(self._driver.call, "cuGraphDestroy", self._graph)
                closing.callback(self._driver.call, "cuGraphExecDestroy", native)


class GraphCapture:
    """Capture of the work that the block queues on `stream`; `graph` is set when the block ends.

    Work of other threads is not captured. If a call cannot be captured the block ends in
    `executor_failed`, and the stream can be used as before.
    """

    def __init__(self, context: CudaContext, stream: CudaStream) -> None:
        self._driver = context.driver
        self._stream = stream
        self._graph: CudaGraph | None = None

    def __enter__(self) -> "GraphCapture":  # noqa: PYI034 (typing.Self needs Python 3.11)
        modes = self._driver.api.CUstreamCaptureMode
        mode = modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._driver.call("cuStreamBeginCapture", self._stream.native, mode)
        return self

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        # The stream leaves its capture in any case, also when the capture had become invalid.
        status, graph = self._driver.function("cuStreamEndCapture")(self._stream.native)
        if error is None and not status:
            with undoing() as undo:
                undo.callback(self._driver.call, "cuGraphDestroy", graph)
                self._graph = CudaGraph(self._driver, graph)
            return
        if graph is not None and int(graph):
            self._driver.call("cuGraphDestroy", graph)
        if error is None:
            failure = self._driver.failure("cuStreamEndCapture", status)
            raise HearthError(failure.code, f"the step cannot be captured: {failure.message}")

    @property
    def graph(self) -> CudaGraph:
        """Graph that was captured; raises `internal` before the block has ended."""
        if self._graph is None:
            raise HearthError("internal", "nothing was captured")
        return self._graph

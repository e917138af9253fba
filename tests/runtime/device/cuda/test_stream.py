import ctypes
from typing import Any

import numpy as np
import pytest

from hearth.runtime.device.cuda.context import CudaContext
from hearth.runtime.device.cuda.driver import CudaDriver
from hearth.runtime.device.cuda.graph import GraphCapture
from hearth.runtime.device.cuda.memory import CudaMemory
from hearth.runtime.device.cuda.sample_ring import CudaPendingSamples, SampleRing, SampleSlot
from hearth.runtime.device.cuda.stream import CudaEvent, CudaSpan, CudaStream
from hearth.runtime.device.cuda.upload import UploadRing
from hearth.runtime.device.cuda.walks import RoundPace
from hearth.runtime.errors import HearthError
from hearth.runtime.request import NO_ROW, RowToken, TopLogprob
from tests.runtime.device.cuda.fake_driver import CUresult, FakeDriver


class HostDriver(FakeDriver):
    """Pinned memory is a real buffer, and copies to the device are kept."""

    CU_MEMHOSTALLOC_PORTABLE = 1
    CU_MEMHOSTALLOC_DEVICEMAP = 2

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[Any] = []
        self.copied: list[tuple[int, bytes]] = []

    def cuMemHostAlloc(self, size: int, flags: int) -> tuple[CUresult, int]:  # noqa: N802 - the library's name
        assert flags == 3
        self.blocks.append((ctypes.c_uint8 * size)(*[7] * size))
        return CUresult.CUDA_SUCCESS, ctypes.addressof(self.blocks[-1])

    def cuMemcpyHtoDAsync(  # noqa: N802 - the library's name
        self, target: int, source: int, size: int, stream: int
    ) -> tuple[CUresult]:
        assert stream == 17
        self.copied.append((target, ctypes.string_at(source, size)))
        return (CUresult.CUDA_SUCCESS,)


def ring_of(api: HostDriver, slots: int, slot_bytes: int) -> UploadRing:
    context = CudaContext(CudaDriver(api))
    memory = CudaMemory(context, pinned=256)
    return UploadRing(context, memory, CudaStream(context), slots, slot_bytes)


def test_uploads_take_slots_in_turn_and_come_in_pieces() -> None:
    api = HostDriver()
    ring = ring_of(api, 3, 16)
    ring.upload(1000, np.arange(5))
    assert [target for target, _ in api.copied] == [1000, 1016, 1032]
    assert b"".join(data for _, data in api.copied) == np.arange(5).tobytes()
    ring.upload(2000, np.arange(4, dtype=np.int32)[::2])
    assert api.copied[-1] == (2000, np.array([0, 2], np.int32).tobytes())
    assert ring.waits == 0


def test_an_upload_waits_only_for_a_slot_that_is_still_copied() -> None:
    api = HostDriver()
    ring = ring_of(api, 2, 16)
    ring.upload(0, np.zeros(2))
    assert "cuEventSynchronize" not in api.names()
    api.failing["cuEventQuery"] = CUresult.CUDA_ERROR_NOT_READY
    ring.upload(0, np.zeros(2))
    assert api.names()[-3:] == ["cuEventQuery", "cuEventSynchronize", "cuEventRecord"]
    assert ring.waits == 1


def test_a_copy_that_cannot_be_marked_is_waited_for() -> None:
    api = HostDriver()
    ring = ring_of(api, 2, 16)
    api.failing["cuEventRecord"] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(HearthError, match="cuEventRecord"):
        ring.upload(0, np.zeros(2))
    assert api.names()[-2:] == ["cuEventRecord", "cuStreamSynchronize"]


def test_what_the_device_raised_comes_out_of_query_and_wait() -> None:
    api = FakeDriver()
    context = CudaContext(CudaDriver(api))
    event, stream = CudaEvent(context), CudaStream(context)
    assert event.query()
    for name in ("cuEventQuery", "cuEventSynchronize", "cuEventRecord", "cuStreamSynchronize"):
        api.failing[name] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    works = (event.query, event.wait, lambda: event.record(stream), stream.synchronize)
    for work in works:
        with pytest.raises(HearthError, match="CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
            work()
        assert caught.value.code == "device_lost"


def test_pinned_memory_is_zeroed() -> None:
    memory = CudaMemory(CudaContext(CudaDriver(HostDriver())), pinned=256)
    tensor = memory.pinned_zeros("host", (3, 4), np.dtype(np.int32))
    assert tensor.array.tolist() == [[0] * 4] * 3
    assert tensor.address == tensor.array.ctypes.data


def test_a_capture_gives_a_graph_that_is_freed_once() -> None:
    api = FakeDriver()
    context = CudaContext(CudaDriver(api))
    stream = CudaStream(context)
    capture = GraphCapture(context, stream)
    with capture:
        assert api.calls[-1][0] == "cuStreamBeginCapture"
        assert api.calls[-1][2] == "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL"
    capture.graph.launch(stream)
    assert api.calls[-1] == ("cuGraphLaunch", "graph", 17)
    capture.graph.close()
    capture.graph.close()
    assert api.names().count("cuGraphExecDestroy") == 1
    assert api.names().count("cuGraphDestroy") == 1


def test_a_graph_that_cannot_be_made_is_freed() -> None:
    api = FakeDriver()
    context = CudaContext(CudaDriver(api))
    stream = CudaStream(context)
    api.failing["cuGraphInstantiate"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(HearthError, match="cuGraphInstantiate"), GraphCapture(context, stream):
        pass
    assert api.calls[-1] == ("cuGraphDestroy", 23)


def test_events_that_nobody_closed_go_with_their_context() -> None:
    api = FakeDriver()
    context = CudaContext(CudaDriver(api))
    events = [CudaEvent(context) for _ in range(3)]
    events[1].close()
    for _ in range(2):
        context.close_events()
    assert api.names().count("cuEventDestroy") == 3


def test_a_capture_that_fails_is_named_and_ended() -> None:
    api = FakeDriver()
    context = CudaContext(CudaDriver(api))
    capture = GraphCapture(context, CudaStream(context))
    api.failing["cuStreamEndCapture"] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(HearthError, match="cannot be captured: cuStreamEndCapture"), capture:
        pass
    with pytest.raises(HearthError, match="nothing was captured"):
        _ = capture.graph
    assert api.names()[-1] == "cuGraphDestroy"


def test_a_span_says_what_its_work_took_once_that_has_ended() -> None:
    api = FakeDriver()
    api.results["cuEventElapsedTime"] = (2.5,)
    context = CudaContext(CudaDriver(api))
    span = CudaSpan(context, CudaStream(context))
    span.end()
    api.failing["cuEventQuery"] = CUresult.CUDA_ERROR_NOT_READY
    assert [span.seconds] == [None]
    del api.failing["cuEventQuery"]
    assert span.seconds == 0.0025
    assert api.names().count("cuEventDestroy") == 2
    assert span.seconds == 0.0025
    assert not context.open_events


class _Ring:
    """A ring of two slots for four rows, whose results the test writes."""

    def __init__(self) -> None:
        self.api = HostDriver()
        context = CudaContext(CudaDriver(self.api))
        self.stream = CudaStream(context)
        self.ring = SampleRing(context, CudaMemory(context), 4, slots=2)

    def queue(
        self, tokens: list[int], wanted: dict[int, int] | None = None
    ) -> tuple[SampleSlot, CudaPendingSamples]:
        slot = self.ring.take()
        slot.results["token"][: len(tokens)] = tokens
        return slot, CudaPendingSamples(slot, self.stream, len(tokens), wanted or {})


def test_tokens_come_in_the_order_of_the_rows_and_none_where_one_failed() -> None:
    slot, pending = _Ring().queue([5, 6, 7])
    slot.results["failed"][1] = 1
    assert pending.result() == [RowToken(NO_ROW, 5), None, RowToken(NO_ROW, 7)]


def test_log_probabilities_come_for_the_rows_that_want_them() -> None:
    slot, pending = _Ring().queue([-1, 6, 7, 8], wanted={1: 1, 3: 0})
    for row in slot.results:
        row["mass"], row["highest"], row["chosen"] = 1 << 40, 3.0, 2.0
        row["ids"][0], row["logits"][0] = 9, 3.0
    assert pending.result() == [
        RowToken(NO_ROW, -1),
        RowToken(NO_ROW, 6, -1.0, (TopLogprob(9, 0.0),)),
        RowToken(NO_ROW, 7),
        RowToken(NO_ROW, 8, -1.0),
    ]


def test_a_row_that_failed_has_no_log_probabilities() -> None:
    slot, pending = _Ring().queue([5], wanted={0: 1})
    slot.results["failed"][0] = 1
    assert pending.result() == [None]


def test_the_device_is_waited_for_once() -> None:
    ring = _Ring()
    _, pending = ring.queue([5])
    assert "cuEventSynchronize" not in ring.api.names()
    assert pending.result() is pending.result()
    assert ring.api.names().count("cuEventSynchronize") == 1


def test_what_the_step_raised_is_raised_by_its_result() -> None:
    ring = _Ring()
    _, pending = ring.queue([5])
    ring.api.failing["cuEventSynchronize"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(HearthError) as caught:
        pending.result()
    assert caught.value.code == "device_lost"


def test_results_are_lost_when_the_slot_has_its_next_turn() -> None:
    ring = _Ring()
    _, first = ring.queue([5])
    _, second = ring.queue([6])
    _, third = ring.queue([7])
    with pytest.raises(HearthError, match="read too late"):
        first.result()
    assert [second.result(), third.result()] == [[RowToken(NO_ROW, 6)], [RowToken(NO_ROW, 7)]]


def test_nothing_is_expected_at_first() -> None:
    assert not RoundPace().expected


def test_the_shorter_of_two_rounds_is_expected() -> None:
    pace = RoundPace()
    found = []
    for took in (0.002, 0.003, 0.0025, 0.004):
        pace.record(took, ahead=True)
        found.append(pace.expected)
    assert found == [0.002, 0.002, 0.0025, 0.0025]


def test_one_slow_round_makes_no_other_late() -> None:
    """Rounds of 2 ms with one of 400: a wait ends late by what is expected too long."""
    pace, lost = RoundPace(), 0.0
    for real in (0.002, 0.002, 0.4, *[0.002] * 10):
        took = max(real, pace.expected)
        lost += took - real
        pace.record(took, ahead=pace.expected <= real)
    assert lost == pytest.approx(0)


def test_a_round_that_was_over_already_leaves_nothing_to_expect() -> None:
    pace = RoundPace()
    pace.record(0.002, ahead=True)
    pace.record(0.002, ahead=False)
    assert not pace.expected
    pace.record(0.001, ahead=True)
    assert pace.expected == 0.001

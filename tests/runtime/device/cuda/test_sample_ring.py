import pytest

from hearth.runtime.device.cuda.context import CudaContext
from hearth.runtime.device.cuda.driver import CudaDriver
from hearth.runtime.device.cuda.memory import CudaMemory
from hearth.runtime.device.cuda.sample_ring import CudaPendingSamples, SampleRing, SampleSlot
from hearth.runtime.device.cuda.stream import CudaStream
from hearth.runtime.errors import HearthError
from hearth.runtime.request import TopLogprob
from hearth.runtime.sampling import Sample
from tests.runtime.device.cuda.fake_driver import CUresult
from tests.runtime.device.cuda.test_stream import HostDriver


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
    assert pending.result() == [Sample(5), None, Sample(7)]


def test_log_probabilities_come_for_the_rows_that_want_them() -> None:
    slot, pending = _Ring().queue([-1, 6, 7, 8], wanted={1: 1, 3: 0})
    for row in slot.results:
        row["mass"], row["highest"], row["chosen"] = 1 << 40, 3.0, 2.0
        row["ids"][0], row["logits"][0] = 9, 3.0
    assert pending.result() == [
        Sample(-1),
        Sample(6, -1.0, (TopLogprob(9, 0.0),)),
        Sample(7),
        Sample(8, -1.0),
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
    assert [second.result(), third.result()] == [[Sample(6)], [Sample(7)]]

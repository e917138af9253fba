from collections.abc import Sequence
from typing import Any

from runtime.device.stream import Stream
from runtime.errors import Code, HearthError
from runtime.executor.engine import Binding


class ProfileContext:
    """One execution context that stays on one optimisation profile, and its newest bindings."""

    def __init__(self, context: Any, engine: Any, profile: int, log: Any) -> None:
        self.context = context
        self._engine = engine
        self._profile = profile
        self._log = log
        self._selected = False
        self._bound: Sequence[Binding] | None = None

    def select(self, stream: Stream) -> None:
        """Set the profile, once."""
        if self._selected:
            return
        if not self.context.set_optimization_profile_async(self._profile, stream.handle):
            raise failed(self._log, f"profile {self._profile} cannot be used", stream)
        self._selected = True

    def enqueue(self, bindings: Sequence[Binding], stream: Stream) -> None:
        """Queue one step; sets nothing when `bindings` is the tuple of the step before."""
        if bindings is not self._bound:
            self._bind(bindings, stream)
        if not self.context.execute_async_v3(stream.handle):
            raise failed(self._log, "the engine failed in a step", stream)

    def forget(self) -> None:
        """Bind anew in the next step."""
        self._bound = None

    def _bind(self, bindings: Sequence[Binding], stream: Stream) -> None:
        self._bound = None
        context = self.context
        for one in bindings:
            if one.direction == "input":
                self._check_range(one)
                if not context.set_input_shape(one.name, one.shape):
                    raise self._refused(one)
            if not context.set_tensor_address(one.name, one.tensor.address):
                raise failed(self._log, f"the address of {one.name} is refused", stream)
        self._bound = bindings

    def _check_range(self, one: Binding) -> None:
        # A plan of TensorRT 8.6 takes any shape here, and fails in the step without a name.
        if min(self._engine.get_tensor_shape(one.name), default=0) >= 0:
            return
        low, high = self._range(one.name)
        fits = len(low) == len(one.shape) and all(
            least <= size <= most for least, size, most in zip(low, one.shape, high, strict=True)
        )
        if not fits:
            raise self._refused(one)

    def _range(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        low, _, high = self._engine.get_tensor_profile_shape(name, self._profile)
        return tuple(low), tuple(high)

    def _refused(self, one: Binding) -> HearthError:
        low, high = self._range(one.name)
        self._log.take()
        return HearthError(
            "invalid_value",
            f"{one.name} has shape {one.shape} in a step; profile {self._profile} of the engine "
            f"serves {low} to {high}",
            one.name,
        )


def failed(log: Any, what: str, stream: Stream) -> HearthError:
    """The error for a call of TensorRT that failed, with what the library logged.

    It is `device_lost` where the device has died with it.
    """
    text = log.take()
    try:
        stream.synchronize()
    except HearthError as lost:
        # A stream that is being captured cannot be waited for, which says nothing of the device.
        if lost.code == "device_lost":
            return lost
    code: Code = "out_of_memory" if "out of memory" in text.lower() else "executor_failed"
    return HearthError(code, f"{what}: {text}")

import ctypes
from typing import NamedTuple

from runtime.config import DType
from runtime.device.cuda.launch import Launch, addresses, integers
from runtime.device.cuda.programs import Kernels

Tap = tuple[int, int]
"""An address where the stream goes as elements too, and elements from a token to the next."""
_BLOCK = 128
_EIGHT = 8


class StreamArguments(ctypes.Structure):
    """What `csrc/decoder/enter.cu` reads; sizes in eighths, for one thread takes eight elements."""

    _fields_ = (*addresses("source x tap cleared"), *integers("eighths width stride numbers"))


class StreamConfig(NamedTuple):
    """`Config` of csrc/decoder/enter.cu."""

    bfloat: bool


class ResidualStream:
    """Launches that begin the residual stream x [T, H] and add to it.

    Source: elements [T, H]; H is a multiple of 8.
    """

    def __init__(self, programs: Kernels, dtype: DType, hidden: int) -> None:
        config = StreamConfig(bfloat=dtype == "bfloat16")
        self._functions = {
            name: programs.kernel("decoder/enter", name, config) for name in ("begin", "add")
        }
        self._hidden = hidden

    def begin(
        self,
        source: int,
        x: int,
        tokens: int,
        tap: Tap | None = None,
        cleared: tuple[int, int] = (0, 0),
    ) -> Launch:
        """Let x be the elements at `source`.

        `cleared` is an address where nobody has told x A yet, and how many numbers are there.
        """
        return self._launch("begin", source, x, tokens, tap, cleared=cleared)

    def add(self, source: int, x: int, tokens: int, tap: Tap | None = None) -> Launch:
        """Add the elements at `source` to x."""
        return self._launch("add", source, x, tokens, tap)

    def _launch(
        self,
        name: str,
        source: int,
        x: int,
        tokens: int,
        tap: Tap | None,
        *,
        cleared: tuple[int, int] = (0, 0),
    ) -> Launch:
        to, stride = tap or (0, 0)
        width = self._hidden // _EIGHT
        eighths = tokens * width
        place, numbers = cleared
        stride //= _EIGHT
        arguments = StreamArguments(source, x, to, place, eighths, width, stride, numbers // 4)
        grid = (-(-eighths // _BLOCK), 1, 1)
        return Launch(self._functions[name], grid, _BLOCK, 0, arguments, name)

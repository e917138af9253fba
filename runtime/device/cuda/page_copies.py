import ctypes
from collections.abc import Sequence

from runtime.device.cuda.launch import addresses, integers
from runtime.device.cuda.programs import KernelLibrary
from runtime.device.cuda.row_moves import RowsArguments
from runtime.reference.ops import PageCopy
from runtime.tensors.tensor import Tensor

PAGES = 64
_THREADS = 256


class PagesArguments(ctypes.Structure):
    """`Pages` of csrc/step/cache.cu, passed by value."""

    _fields_ = (
        *addresses("pool"),
        *integers("page_tokens save"),
        *((name, ctypes.c_int32 * PAGES) for name in PageCopy._fields),
    )


class PageCopies:
    """Copies between rows and pages, all buffers in one launch."""

    def __init__(self, library: KernelLibrary, unit: str, rows: RowsArguments) -> None:
        self._rows, self._pages = rows, PagesArguments()
        options = ("-DINDEX=int", f"-DUNIT={unit}")
        self._launch = library.prepare(
            "step/cache", "copy_pages", options, _THREADS, (rows, self._pages)
        )

    def queue(self, pool: Tensor, copies: Sequence[PageCopy], *, save: bool) -> None:
        """Queue checked copies, in one launch up to `PAGES` of them."""
        pages = self._pages
        _, buffers, heads, tokens, _ = pool.shape
        pages.pool, pages.page_tokens, pages.save = pool.address, tokens, int(save)
        needed = [copy for copy in copies if copy.tokens]
        for first in range(0, len(needed), PAGES):
            part = needed[first : first + PAGES]
            for name, values in zip(PageCopy._fields, zip(*part, strict=True), strict=True):
                getattr(pages, name)[: len(part)] = values
            units = heads * max(copy.tokens for copy in part) * self._rows.width
            self._launch.launch(-(-units // _THREADS), len(part), buffers)

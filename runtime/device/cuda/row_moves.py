import ctypes
from collections.abc import Sequence

from runtime.arrangement import RowMove
from runtime.device.cuda.launch import KernelLaunch, addresses, integers
from runtime.device.cuda.programs import KernelLibrary
from runtime.errors import HearthError

MOVES = 64
_THREADS = 256


class RowsArguments(ctypes.Structure):
    """`Rows` of csrc/step/cache.cu: `buffers` is the address of a table of addresses."""

    _fields_ = (*addresses("buffers"), *integers("heads slots width"))


class Moves(ctypes.Structure):
    """`Moves` of csrc/step/cache.cu, passed by value."""

    _fields_ = (
        ("count", ctypes.c_int32),
        ("source", ctypes.c_int32 * MOVES),
        ("target", ctypes.c_int32 * MOVES),
        ("used", ctypes.c_int32 * MOVES),
    )

    def fill(self, moves: Sequence[RowMove]) -> None:
        """Take at most `MOVES` moves."""
        self.count = len(moves)
        for i, move in enumerate(moves):
            self.source[i], self.target[i], self.used[i] = move


def prepare_moves(
    library: KernelLibrary, unit: str, rows: RowsArguments, moves: Moves
) -> KernelLaunch:
    """The launch that moves rows of `unit`s; both structures are read when it is launched."""
    options = ("-DINDEX=int", f"-DUNIT={unit}")
    return library.prepare("step/cache", "move_rows", options, _THREADS, (rows, moves))


def queue_moves(
    launch: KernelLaunch, rows: RowsArguments, table: Moves, moves: Sequence[RowMove], buffers: int
) -> None:
    """Queue `moves`, in one launch up to `MOVES` of them; raises what `check_order` does."""
    check_order(moves)
    needed = [move for move in moves if move.source != move.target and move.used > 0]
    for first in range(0, len(needed), MOVES):
        part = needed[first : first + MOVES]
        table.fill(part)
        units = min(max(move.used for move in part), rows.slots) * rows.width
        launch.launch(-(-units // _THREADS), rows.heads, buffers)


def check_order(moves: Sequence[RowMove]) -> None:
    """Raise `internal` where a source or a target is an earlier target."""
    written: set[int] = set()
    for source, target, _ in moves:
        if source in written or target in written:
            raise HearthError("internal", f"rows cannot be moved in this order: {list(moves)}")
        written.add(target)

from typing import Any

import ml_dtypes
import numpy as np

from hearth.runtime.errors import HearthError

_INDEX: dict[np.dtype[Any], str] = {np.dtype(np.int32): "int", np.dtype(np.int64): "long long"}
_FLOAT: dict[np.dtype[Any], str] = {
    np.dtype(np.float32): "float",
    np.dtype(np.float16): "half_bits",
    np.dtype(ml_dtypes.bfloat16): "bfloat_bits",
}
# The widest type first; all are copied in one access.
_UNITS = ((16, "uint4"), (8, "uint2"), (4, "unsigned"), (2, "unsigned short"))


def index_type(dtype: np.dtype[Any], name: str) -> str:
    """The C++ type of an index tensor; raises `internal` naming it."""
    return _spelled(_INDEX, dtype, name)


def float_type(dtype: np.dtype[Any], name: str) -> str:
    """The C++ type of a floating-point tensor; raises `internal` naming it."""
    return _spelled(_FLOAT, dtype, name)


def copy_unit(nbytes: int) -> tuple[int, str]:
    """Bytes and C++ type of the widest unit that divides `nbytes`; raises `internal`."""
    for size, spelling in _UNITS:
        if nbytes % size == 0:
            return size, spelling
    raise HearthError("internal", f"{nbytes} bytes cannot be copied in units")


def _spelled(types: dict[np.dtype[Any], str], dtype: np.dtype[Any], name: str) -> str:
    spelling = types.get(dtype)
    if spelling is None:
        raise HearthError("internal", f"no CUDA kernel for {name} of type {dtype}", name)
    return spelling

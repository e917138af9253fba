from typing import Any

import ml_dtypes
import numpy as np

from runtime.config import DType

_NUMPY: dict[DType, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def numpy_dtype(name: DType) -> np.dtype[Any]:
    """The NumPy type of a configuration's element type."""
    return _NUMPY[name]

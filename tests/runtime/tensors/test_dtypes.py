from typing import get_args

import ml_dtypes
import numpy as np

from hearth.runtime.config import DType
from hearth.runtime.tensors.tensor import numpy_dtype


def test_every_configured_type_has_a_numpy_type() -> None:
    assert {name: numpy_dtype(name) for name in get_args(DType)} == {
        "float32": np.dtype(np.float32),
        "float16": np.dtype(np.float16),
        "bfloat16": np.dtype(ml_dtypes.bfloat16),
    }

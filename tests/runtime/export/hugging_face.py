"""Copies of stored reference models with something changed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from runtime.export.checkpoint import SINGLE_FILE
from tests.references import reference_folder

Tensors = dict[str, NDArray[Any]]


def copy_model(name: str, target: Path, **fields: Any) -> Path:
    """A copy of a reference model, with fields of its config.json replaced or (None) removed."""
    shutil.copytree(reference_folder(name), target)
    path = target / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return target


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Rewrite the weights of a model with one safetensors file after changing them."""
    tensors = {name: np.array(value) for name, value in load_file(folder / SINGLE_FILE).items()}
    change(tensors)
    save_file(tensors, folder / SINGLE_FILE)

"""Copies of stored reference models with something changed."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from hearth.runtime.export.checkpoint import INDEX_FILE, SINGLE_FILE
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


def shallow_model(name: str, target: Path) -> Path:
    """The first layer alone of a reference model, for what depends on no other."""
    model = copy_model(name, target, num_hidden_layers=1, layer_types=None)
    kept: Tensors = {}
    for path in model.glob("model*.safetensors"):
        tensors = load_file(path)
        later = {name for name in tensors if re.match(r"model\.layers\.[1-9]", name)}
        kept |= {name: value for name, value in tensors.items() if name not in later}
        path.unlink()
    (model / INDEX_FILE).unlink(missing_ok=True)
    save_file(kept, model / SINGLE_FILE)
    return model

"""Sizes of models and facts of GPUs that launches are planned for."""

from typing import NamedTuple

from hearth.runtime.device.cuda.gpu_facts import GpuFacts

GPUS = {
    "H200": GpuFacts((9, 0), 132, 232_448, 233_472, 8),
    "a part of H200": GpuFacts((9, 0), 16, 232_448, 233_472),
    "Orin": GpuFacts((8, 7), 16, 166_912, 167_936),
    "RTX 3090": GpuFacts((8, 6), 82, 101_376, 102_400),
}


class ModelShape(NamedTuple):
    """Inputs and outputs of the products of a layer, and the vocabulary."""

    hidden: int
    queries: int
    keys: int
    inner: int
    vocabulary: int


MODELS = {
    "0.6B": ModelShape(1024, 2048, 1024, 3072, 151_936),
    "4B": ModelShape(2560, 4096, 1024, 9728, 151_936),
    "toy": ModelShape(72, 32, 16, 200, 264),
}

"""Attention compiles for GPUs that are not here, without spilling, in 48 KB of shared memory."""

import re
from functools import cache

import pytest

from runtime.device.cuda.compiler import load_compiler_api
from runtime.device.cuda.programs import macro_options
from runtime.executor.kernels.attention import AttentionShape, plan_nodes
from tests.runtime.executor.kernels.ptxas import ptxas_log

pytest.importorskip("cuda.bindings.nvrtc", exc_type=ImportError)
pytestmark = pytest.mark.slow
REGISTERS = 65_536
THREADS = 128
SHARED = 48 * 1024
SPREAD: dict[str, int | str] = {
    "SHARE": 4,
    "FUSED": 0,
    "SINGLE": 0,
    "HALVES": 2,
    "WHOLE": 0,
    "BY_WARP": 0,
    "LONE": 0,
}
PAIRED = SPREAD | {"BY_WARP": 1}
WIDE = SPREAD | {"SHARE": 2, "WHOLE": 1}
STAGED = WIDE | {"STAGED": 1}
FEW = SPREAD | {"FUSED": 1, "HALVES": 1}
LONE = FEW | {"LONE": 1}
DECODE = FEW | {"SINGLE": 1, "HALVES": 1}
CROWDED = DECODE | {"WHOLE": 1}
FORMS = {
    "sm_80": [(DECODE, 0, 128), (LONE, 1, 128)],
    "sm_86": [(WIDE, 0, 64)],
    "sm_87": [(DECODE, 0, 80), (SPREAD, 0, 128), (WIDE, 0, 128)],
    "sm_89": [(CROWDED, 0, 128)],
    "sm_90": [
        (DECODE, 0, 256), (FEW, 1, 128), (PAIRED, 1, 128), (WIDE, 1, 128), (LONE, 0, 128),
        (STAGED, 0, 128),
    ],
    "sm_100": [(FEW, 0, 16), (LONE, 1, 128)],
    "sm_110": [(DECODE, 0, 112)],
    "sm_120": [(PAIRED, 1, 64), (WIDE, 0, 64), (FEW, 0, 256), (SPREAD, 1, 256)],
    "sm_121": [(CROWDED, 0, 256)],
}  # fmt: skip


@cache
def known() -> frozenset[str]:
    _, numbers = load_compiler_api().nvrtcGetSupportedArchs()
    return frozenset(f"sm_{number}" for number in numbers)


def compiled(architecture: str, options: tuple[str, ...], file: str = "attention/attention") -> str:
    """The log of ptxas."""
    return ptxas_log(architecture, file, options)


@pytest.mark.parametrize("architecture", FORMS)
def test_attention_compiles_for(architecture: str) -> None:
    if architecture not in known():
        pytest.skip(f"this NVRTC does not know {architecture}")
    for place, (form, tree, dim) in enumerate(FORMS[architecture]):
        sizes = {"DIM": dim, "ROTARY": dim // 2 if dim == 80 else dim, "BFLOAT": place % 2}
        heads = {"QUERY_HEADS": 16, "KV_HEADS": 8, "TREE": tree, "EARLY": 1, "CLUSTERS": 1}
        log = compiled(architecture, macro_options(form | sizes | heads))
        assert "redefinition" not in log, log  # of a macro, which is but warned of
        numbers = re.findall(r"Used (\d+) registers", log)
        assert max(map(int, numbers)) * THREADS * 2 <= REGISTERS, (form, log)
        assert max(map(int, re.findall(r"(\d+) bytes smem", log))) <= SHARED, (form, log)
        spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill", log)
        assert spilled == [("0", "0")] * 2, (form, log)


@pytest.mark.parametrize(
    ("architecture", "heads", "dim"),
    [("sm_80", 8, 128), ("sm_90", 16, 128), ("sm_90", 32, 128), ("sm_100", 16, 16)],
)
def test_attention_by_nodes_compiles_for(architecture: str, heads: int, dim: int) -> None:
    plan = plan_nodes(AttentionShape(dim, heads, 8), 60, 512)
    assert plan is not None
    sizes = {"DIM": dim, "ROTARY": dim // 2, "QUERY_HEADS": heads, "KV_HEADS": 8, "BFLOAT": 1}
    options = macro_options({**sizes, "EARLY": 1, "SHARED_BYTES": plan.shared_bytes})
    log = compiled(architecture, options, "attention/nodes")
    assert "redefinition" not in log, log
    assert re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill", log) == [("0", "0")], log

"""Attention compiles for GPUs that are not here, without spilling, in 48 KB of shared memory."""

import re
from functools import cache

import pytest

from hearth.runtime.device.cuda.compiler import load_compiler_api
from hearth.runtime.executor.kernels.attention import (
    AttentionConfig,
    AttentionShape,
    HeadConfig,
    NodesConfig,
    plan_nodes,
)
from tests.runtime.executor.kernels.ptxas import ptxas_log

pytest.importorskip("cuda.bindings.nvrtc", exc_type=ImportError)
pytestmark = pytest.mark.slow
REGISTERS = 65_536
THREADS = 128
SHARED = 48 * 1024
FIRST_WITH_CLUSTERS = 90
HEADS = HeadConfig(bfloat=False, dim=128, rotary=128, query_heads=16, kv_heads=8, early=True)
SPREAD = AttentionConfig(HEADS, share=4)
PAIRED = SPREAD._replace(by_warp=True)
WIDE = SPREAD._replace(share=2, whole=True)
STAGED = WIDE._replace(staged=True)
FEW = SPREAD._replace(fused=True, halves=1)
LONE = FEW._replace(lone=True)
DECODE = FEW._replace(single=True)
CROWDED = DECODE._replace(whole=True)
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


@pytest.mark.parametrize("architecture", FORMS)
def test_attention_compiles_for(architecture: str) -> None:
    if architecture not in known():
        pytest.skip(f"this NVRTC does not know {architecture}")
    for place, (form, tree, dim) in enumerate(FORMS[architecture]):
        rotary, bfloat = dim // 2 if dim == 80 else dim, bool(place % 2)
        heads = HEADS._replace(dim=dim, rotary=rotary, bfloat=bfloat)
        config = form._replace(heads=heads, tree=bool(tree))
        if int(architecture.removeprefix("sm_")) >= FIRST_WITH_CLUSTERS:
            config = config.in_clusters()
        log = ptxas_log(architecture, "attention/attention", config)
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
    sizes = HEADS._replace(dim=dim, rotary=dim // 2, query_heads=heads, bfloat=True)
    log = ptxas_log(architecture, "attention/nodes", NodesConfig(sizes, plan.shared_bytes))
    assert "redefinition" not in log, log
    assert re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill", log) == [("0", "0")], log

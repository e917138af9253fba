import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from hearth.daemon.cli.export import export
from hearth.runtime.export import DraftOptions, ExportOptions
from hearth.runtime.export.tensorrt.options import PlanOptions


class Asked(Exception):  # noqa: N818 - carries the options out of the command
    pass


@pytest.fixture(autouse=True)
def no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(_source: Path, _target: Path, options: ExportOptions, _progress: Any) -> None:
        raise Asked(options)

    monkeypatch.setattr("hearth.runtime.export.export_model", ask)


def asked(*arguments: str) -> ExportOptions:
    with pytest.raises(Asked) as raised:
        CliRunner().invoke(
            export, ["home", "b", *arguments], standalone_mode=False, catch_exceptions=False
        )
    options: ExportOptions = raised.value.args[0]
    return options


def test_onnx_runtime_has_no_plan() -> None:
    options = asked()
    assert (options.plan, options.dtype) == (None, "float32")


def test_kernels_are_for_a_gpu_in_sixteen_bits() -> None:
    for given in (("--backend", "kernels"), ("--device", "cuda")):
        options = asked(*given)
        # Those of the shipped model's own.
        assert (options.engine, options.device, options.dtype) == ("kernels", "cuda", "bfloat16")
    options = asked("--backend", "onnxruntime", "--device", "cuda", "--dtype", "float32")
    assert (options.engine, options.device, options.dtype) == ("onnxruntime", "cuda", "float32")
    options = asked("--backend", "kernels", "--device", "cuda", "--dtype", "bfloat16")
    assert (options.engine, options.device, options.dtype) == ("kernels", "cuda", "bfloat16")


@pytest.mark.parametrize("asking", [("--backend", "kernels"), ("--device", "cuda")])
@pytest.mark.parametrize(
    "given",
    [
        ("--dtype", "float32"),
        ("--dialect", "classic"),
        ("--quantization", "int8", "--block-size", "16"),
        ("--draft", "c", "--verify", "chains"),
        ("--draft", "c", "--drafting-top-k", "4"),
        ("--builder", "tensorrt"),
    ],
    ids=" ".join,
)
def test_kernels_refuse_what_is_for_another_engine(
    asking: tuple[str, ...], given: tuple[str, ...]
) -> None:
    arguments = ["a", "b", *asking, *given]
    with pytest.raises(click.UsageError):
        CliRunner().invoke(export, arguments, standalone_mode=False, catch_exceptions=False)


def test_kernels_do_not_run_on_the_cpu() -> None:
    arguments = ["a", "b", "--backend", "kernels", "--device", "cpu"]
    with pytest.raises(click.UsageError, match="choose device cuda"):
        CliRunner().invoke(export, arguments, standalone_mode=False, catch_exceptions=False)


def test_a_plan_proposes_trees_of_one_shape() -> None:
    options = asked(
        *("--backend", "tensorrt", "--draft", "c", "--drafting-top-k", "4"),
        *("--drafting-step", "3"),
    )
    assert options.draft == DraftOptions(folder=Path("c"), drafting_top_k=4, drafting_step=3)


def test_a_plan_has_the_builder_of_this_python_and_keeps_timings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEARTH_CACHE", "/c")
    options = asked("--backend", "tensorrt")
    assert options.dtype == "float16"
    assert options.plan == PlanOptions(
        python=sys.executable, timing_cache=Path("/c/tensorrt-timing.cache")
    )


def test_every_option_reaches_the_builder() -> None:
    options = asked(
        *("--backend", "tensorrt", "--builder", "tensorrt_rtx", "--builder-python", "p"),
        *("--version-compatible", "--workspace-mib", "3", "--optimization-level", "2"),
        *("--timing-cache", "t", "--dtype", "bfloat16", "--kv-cache-dtype", "float32"),
    )
    assert options.dtype == "bfloat16"
    assert options.plan == PlanOptions(
        builder="tensorrt_rtx",
        python="p",
        version_compatible=True,
        workspace_bytes=3 << 20,
        optimization_level=2,
        timing_cache=Path("t"),
        kv_cache_dtype="float32",
    )


@pytest.mark.parametrize(
    "option",
    [
        ("--builder", "tensorrt"),
        ("--builder-python", "p"),
        ("--version-compatible",),
        ("--workspace-mib", "0"),
        ("--optimization-level", "0"),
        ("--timing-cache", "t"),
        ("--kv-cache-dtype", "auto"),
    ],
)
def test_an_option_of_plans_alone_is_refused_without_one(option: tuple[str, ...]) -> None:
    with pytest.raises(click.UsageError, match=f"{option[0]} is for --backend tensorrt"):
        CliRunner().invoke(export, ["a", "b", *option], standalone_mode=False,
                           catch_exceptions=False)  # fmt: skip

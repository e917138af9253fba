import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import click
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner, Result
from msgspec import structs

from hearth.daemon.cli.export import export
from hearth.daemon.cli.serve import serve
from hearth.runtime.config import LLMEngineRunnerConfig, load_config
from hearth.runtime.errors import HearthError
from hearth.runtime.export import DraftOptions, ExportOptions
from hearth.runtime.export.draft_config import check_draft_options, resolve_tree
from hearth.runtime.export.options import PlanOptions
from hearth.runtime.generation.deployment import load_deployment, resolve_deployment
from hearth.runtime.options import EagleDraftingConfig, RuntimeOptions, SpeculationOptions
from hearth.runtime.vision_config import load_vision_config
from tests.conftest import REFERENCE
from tests.eagle_models import write_draft
from tests.runtime.engine_configs import draft_config, small_config
from tests.runtime.export.hugging_face import change_tensors, copy_model
from tests.vision_models import write_vision_model


def run(*arguments: str) -> Result:
    return CliRunner().invoke(export, arguments, standalone_mode=False, catch_exceptions=False)


def test_every_option_reaches_the_engine(tmp_path: Path) -> None:
    target = tmp_path / "engine"
    result = run(
        *(str(REFERENCE), str(target), "--dialect", "classic", "--capacity", "64"),
        *("--max-batch", "2", "--prefill-chunk", "16", "--quantization", "int8"),
        *("--max-lora-rank", "8", "--lora-targets", "q,v"),
    )
    config = load_config(target)
    assert (config.max_supported_lora_rank, config.lora_targets) == (8, ("qkv",))
    assert (config.dialect, config.max_kv_cache_capacity) == ("classic", 64)
    assert (config.max_supported_batch_size, config.prefill_chunk) == (2, 16)
    assert (config.weight_quantization, config.weight_block_size) == ("int8", 32)
    assert "hearth serve --engine" in result.stderr


@pytest.mark.parametrize(
    ("asked", "weights"),
    [
        ([], "native, float32,"),
        (["--quantization", "int8"], "native, int8 weights, float32 else,"),
        (["--quantization", "int4"], "native, int4 weights, int8 head, float32 else,"),
        (["--head-quantization", "int4"], "native, int4 head, float32 else,"),
    ],
)
def test_the_last_lines_say_what_became_of_the_weights(
    tmp_path: Path, asked: list[str], weights: str
) -> None:
    result = run(str(REFERENCE), str(tmp_path / "engine"), "--dialect", "native", *asked)
    words = " ".join(result.stderr.split())
    assert f"done qwen3, {weights}" in words
    assert ("have the same likeliest successor as without quantisation" in words) == bool(asked)


def test_a_draft_is_exported_beside_the_model(tmp_path: Path) -> None:
    target, draft = tmp_path / "engine", write_draft(REFERENCE, tmp_path / "draft")
    result = run(
        *(str(REFERENCE), str(target), "--draft", str(draft), "--eagle-layers", "0,2,3"),
        *("--max-verify-tree-size", "9", "--max-draft-tree-size", "8", "--verify", "chains"),
    )
    config = load_config(target)
    assert (config.eagle_layers, config.max_verify_tree_size) == ((0, 2, 3), 9)
    draft_config = load_config(target / "draft")
    assert draft_config.max_draft_tree_size == 8
    assert config.chains_only
    assert draft_config.chains_only
    assert "with draft" in result.stderr


def test_without_a_draft_its_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(click.UsageError, match="--eagle-layers is for --draft"):
        run(str(REFERENCE), str(tmp_path / "engine"), "--eagle-layers", "0,2,3")


def test_layers_are_numbers() -> None:
    result = CliRunner().invoke(export, ["a", "b", "--draft", "c", "--eagle-layers", "one"])
    assert result.exit_code == 2
    assert "--eagle-layers': 'one' is not a list of numbers like 1,2,3" in result.stderr


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(HearthError):
        run(str(tmp_path / "none"), str(tmp_path / "engine"))
    assert list(tmp_path.iterdir()) == []


def test_wrong_choices_are_usage_errors() -> None:
    result = CliRunner().invoke(export, ["a", "b", "--dtype", "float8"])
    assert result.exit_code == 2


def test_an_option_that_is_gone_says_what_took_its_place() -> None:
    with pytest.raises(click.UsageError, match="kernels"):
        run("a", "b", "--operators", "contrib")


@pytest.mark.parametrize("name", ["a[/b] c", "a[red]"])
def test_any_name_of_a_folder_can_be_copied_from_the_last_line(tmp_path: Path, name: str) -> None:
    target = tmp_path / name
    result = run(str(REFERENCE), str(target))
    assert f"hearth serve --engine {shlex.quote(str(target))}" in result.stderr


@pytest.mark.parametrize(
    "option",
    [
        ("--max-batch", "999999999"),
        ("--prefill-chunk", "99999999"),
        ("--capacity", "1"),
        ("--max-lora-rank", "513"),
        ("--max-lora-rank", "8", "--lora-targets", "q,x"),
        ("--lora-targets", "q"),
        ("--quantization", "int8", "--dtype", "bfloat16"),
    ],
)
def test_what_no_daemon_could_ask_for_is_wrong_usage(
    tmp_path: Path, option: tuple[str, ...]
) -> None:
    result = CliRunner().invoke(export, [str(REFERENCE), str(tmp_path / "engine"), *option])
    assert result.exit_code == 2
    assert not (tmp_path / "engine").exists()


def test_a_model_without_a_chat_template_is_exported_with_a_warning(tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(REFERENCE, source)
    (source / "chat_template.jinja").unlink()
    assert "no chat template" in run(str(source), str(tmp_path / "a")).stderr
    assert "note" not in run(str(REFERENCE), str(tmp_path / "b")).stderr


def test_what_this_machine_cannot_serve_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hearth.daemon.check.available_memory", lambda: 1)
    told = run(str(REFERENCE), str(tmp_path / "engine")).stderr
    assert "this machine cannot serve it as it is: " in told
    assert (tmp_path / "engine" / "config.json").is_file()

    def unreadable(*_: object) -> None:
        raise HearthError("engine_missing", "a file cannot be read")

    monkeypatch.setattr("hearth.daemon.check.load_engines", unreadable)
    told = run(str(REFERENCE), str(tmp_path / "other")).stderr
    assert "this machine cannot serve it as it is: a file cannot be read" in told


@pytest.mark.parametrize(
    ("patches", "said"),
    [
        ("0", ["with more pixels than 256 x 256 are made smaller"]),
        ("64", ["than 64 x 64 are made smaller", "--max-patches 1024 takes them up to 256 x 256"]),
    ],
)
def test_the_size_above_which_pictures_are_made_smaller_is_told(
    tmp_path: Path, patches: str, said: list[str]
) -> None:
    model = write_vision_model(tmp_path / "model", "qwen3_vl")
    result = run(str(model), str(tmp_path / "engine"), "--max-patches", patches)
    told = " ".join(result.stderr.split())
    assert all(words in told for words in said), told
    assert ("--max-patches" in told) == (len(said) > 1)


@pytest.mark.parametrize(
    ("stored", "options", "made"),
    [
        (ml_dtypes.bfloat16, [], "bfloat16"),
        (np.float16, [], "float16"),
        (np.float32, [], "float16"),
        (ml_dtypes.bfloat16, ["--dtype", "float16"], "float16"),
        (np.float16, ["--dtype", "bfloat16"], "bfloat16"),
        (ml_dtypes.bfloat16, ["--backend", "onnxruntime"], "bfloat16"),
        (ml_dtypes.bfloat16, ["--backend", "onnxruntime", "--quantization", "int4"], "float16"),
    ],
)
def test_a_checkpoint_of_16_bits_keeps_its_type_on_a_gpu(
    tmp_path: Path, stored: Any, options: list[str], made: str
) -> None:
    model, target = copy_model("llama", tmp_path / "model"), tmp_path / "engine"
    change_tensors(model, lambda tensors: retype(tensors, stored))
    result = run(str(model), str(target), "--device", "cuda", *options)
    assert load_config(target).dtype == made
    assert made in result.stderr


def retype(tensors: dict[str, Any], dtype: Any) -> None:
    """Matrices in another type; norms stay in float32, as some checkpoints have them."""
    tensors.update({n: t.astype(dtype) for n, t in tensors.items() if t.ndim > 1})


def test_a_tower_stays_in_float16_and_gives_what_its_decoder_takes(tmp_path: Path) -> None:
    model = write_vision_model(tmp_path / "model", "qwen3_vl", dtype=ml_dtypes.bfloat16)
    run(str(model), str(tmp_path / "engine"), "--device", "cuda")
    tower = load_vision_config(tmp_path / "engine")
    assert tower is not None
    assert (load_config(tmp_path / "engine").dtype, tower.dtype) == ("bfloat16", "float16")
    assert tower.embedding_dtype == "bfloat16"
    deployment = load_deployment(tmp_path / "engine", RuntimeOptions(device="cuda"))
    assert deployment.tower is not None


class Asked(Exception):  # noqa: N818 - carries the options out of the command
    pass


@pytest.fixture
def no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(_source: Path, _target: Path, options: ExportOptions, _progress: Any) -> None:
        raise Asked(options)

    monkeypatch.setattr("hearth.runtime.export.export_model", ask)


def asked(*arguments: str) -> ExportOptions:
    with pytest.raises(Asked) as raised:
        run("home", "b", *arguments)
    options: ExportOptions = raised.value.args[0]
    return options


@pytest.mark.usefixtures("no_export")
def test_onnx_runtime_has_no_plan() -> None:
    options = asked()
    assert (options.plan, options.dtype) == (None, "float32")


@pytest.mark.usefixtures("no_export")
def test_kernels_are_for_a_gpu_in_sixteen_bits() -> None:
    for given in (("--backend", "kernels"), ("--device", "cuda")):
        options = asked(*given)
        # Those of the shipped model's own.
        assert (options.engine, options.device, options.dtype) == ("kernels", "cuda", "bfloat16")
    options = asked("--backend", "onnxruntime", "--device", "cuda", "--dtype", "float32")
    assert (options.engine, options.device, options.dtype) == ("onnxruntime", "cuda", "float32")
    options = asked("--backend", "kernels", "--device", "cuda", "--dtype", "bfloat16")
    assert (options.engine, options.device, options.dtype) == ("kernels", "cuda", "bfloat16")


@pytest.mark.usefixtures("no_export")
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
    with pytest.raises(click.UsageError):
        run("a", "b", *asking, *given)


@pytest.mark.usefixtures("no_export")
def test_kernels_do_not_run_on_the_cpu() -> None:
    with pytest.raises(click.UsageError, match="choose device cuda"):
        run("a", "b", "--backend", "kernels", "--device", "cpu")


@pytest.mark.usefixtures("no_export")
def test_a_plan_proposes_trees_of_one_shape() -> None:
    options = asked(
        *("--backend", "tensorrt", "--draft", "c", "--drafting-top-k", "4"),
        *("--drafting-step", "3"),
    )
    assert options.draft == DraftOptions(folder=Path("c"), drafting_top_k=4, drafting_step=3)


@pytest.mark.usefixtures("no_export")
def test_a_plan_has_the_builder_of_this_python_and_keeps_timings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEARTH_CACHE", "/c")
    options = asked("--backend", "tensorrt")
    assert options.dtype == "float16"
    assert options.plan == PlanOptions(
        python=sys.executable, timing_cache=Path("/c/tensorrt-timing.cache")
    )


@pytest.mark.usefixtures("no_export")
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


@pytest.mark.usefixtures("no_export")
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
        run("a", "b", *option)


BASE = structs.replace(
    small_config(), enable_eagle_spec_decode=True, output_hidden_dim=48, max_verify_tree_size=20
)
DRAFT = structs.replace(draft_config(small_config()), max_draft_tree_size=12)
CHAINS = structs.replace(DRAFT, chains_only=True)
STATIC: dict[str, Any] = {"backend": "tensorrt", "device": "cuda", "static_decode_batches": (1, 4)}
PLAN = structs.replace(BASE, **STATIC)
PLAN_DRAFT = structs.replace(DRAFT, **STATIC, static_drafting=(2, 5))
TREE = EagleDraftingConfig(drafting_top_k=2, drafting_step=5, verify_tree_size=20)


def flags(command: click.Command) -> dict[str, str]:
    """The command's flags by the names of their values."""
    return {str(one.name): one.opts[0] for one in command.params if isinstance(one, click.Option)}


def check_names(error: HearthError, command: click.Command) -> None:
    """What the error is about, and all that it speaks of, can be given to the command."""
    known = flags(command)
    assert error.field is not None
    assert known[error.field] == "--" + error.field.replace("_", "-")
    assert set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", error.message)) <= known.keys()


def test_options_are_called_like_their_flags() -> None:
    assert set(EagleDraftingConfig.__struct_fields__) <= flags(serve).keys()
    assert set(DraftOptions.__struct_fields__) - {"folder"} <= flags(export).keys()


@pytest.mark.parametrize(
    ("base", "draft", "wrong"),
    [
        (BASE, DRAFT, {"drafting_top_k": 0}),
        (BASE, DRAFT, {"drafting_step": 0}),
        (BASE, DRAFT, {"drafting_step": 31}),
        (BASE, DRAFT, {"verify_tree_size": 1}),
        (BASE, DRAFT, {"verify_tree_size": 129}),
        (BASE, DRAFT, {"drafting_top_k": 4, "verify_tree_size": 128}),
        (BASE, DRAFT, {"drafting_top_k": 3}),
        (BASE, CHAINS, {}),
        (PLAN, PLAN_DRAFT, {"drafting_top_k": 1, "verify_tree_size": 5}),
        (PLAN, PLAN_DRAFT, {"drafting_step": 4}),
        (PLAN, PLAN_DRAFT, {"verify_tree_size": 19}),
        (BASE, None, {}),
    ],
)
def test_a_refusal_names_what_serving_takes(
    base: LLMEngineRunnerConfig, draft: LLMEngineRunnerConfig | None, wrong: dict[str, int]
) -> None:
    tree = structs.replace(TREE, **wrong)
    speculation = SpeculationOptions(method="lookup" if draft is None else "eagle", eagle=tree)
    with pytest.raises(HearthError) as caught:
        resolve_deployment(base, draft, RuntimeOptions(speculation=speculation))
    check_names(caught.value, serve)
    assert caught.value.field in {*wrong, "draft_tree"}


@pytest.mark.parametrize("tokens", [-1, 31, 20])
def test_a_refused_lookup_names_what_serving_takes(tokens: int) -> None:
    speculation = SpeculationOptions(method="lookup", lookup_tokens=tokens)
    with pytest.raises(HearthError) as caught:
        resolve_deployment(BASE, DRAFT, RuntimeOptions(speculation=speculation))
    assert caught.value.field == "lookup_tokens"
    check_names(caught.value, serve)


@pytest.mark.parametrize(
    ("name", "value", "static"),
    [
        ("max_verify_tree_size", 1, False),
        ("max_verify_tree_size", 129, True),
        ("max_draft_tree_size", -1, False),
        ("max_draft_tree_size", 4, True),
        ("drafting_top_k", -1, True),
        ("drafting_top_k", 4, False),
        ("drafting_step", 4, False),
        ("drafting_step", 31, True),
        ("verify", "chains", True),
    ],
)
def test_a_refusal_names_what_export_takes(name: str, value: object, *, static: bool) -> None:
    options = structs.replace(DraftOptions(folder=Path("draft")), **{name: value})
    with pytest.raises(HearthError) as caught:
        check_draft_options(options, static=static)
    assert caught.value.field == name
    check_names(caught.value, export)


def test_a_tree_that_no_row_holds_is_named() -> None:
    for name in ("max_verify_tree_size", "max_draft_tree_size"):
        with pytest.raises(HearthError) as caught:
            resolve_tree(name, 41, 40)
        check_names(caught.value, export)

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec import structs

from hearth.daemon.check import inspect_engine, with_answer
from hearth.daemon.cli.check import _rows, check
from hearth.daemon.cli.errors import Failure
from hearth.daemon.cli.export import export, weights
from hearth.daemon.cli.generate import generate
from hearth.daemon.configuration.settings import Settings, settings_of
from hearth.daemon.kernel_cache import KernelCache, Target
from hearth.runtime.config import load_config
from hearth.runtime.engine_folder import ANSWER_FILE, record_files, write_config
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from tests.conftest import REFERENCE
from tests.daemon.test_engine_settings import GPU, GPU_PLAN
from tests.references import reference_folder
from tests.runtime.weights.external_models import needs_other_weights


def test_people_get_a_table_and_what_to_do_next(tiny_engine: Path) -> None:
    result = CliRunner().invoke(check, ["--engine", str(tiny_engine)])
    assert result.exit_code == 0
    for words in ("qwen3", "4 rows", "92 tokens a row", "memory needed", "hearth serve"):
        assert words in result.output


def test_programs_get_one_object(tiny_engine: Path) -> None:
    result = CliRunner().invoke(check, ["--engine", str(tiny_engine), "--json"])
    report = json.loads(result.output)
    assert report["ok"] is True
    assert report["max_batch"] == 4


def test_the_rank_of_adapters_is_told(tmp_path: Path, tiny_engine: Path) -> None:
    assert "takes none" in CliRunner().invoke(check, ["--engine", str(tiny_engine)]).output
    export_model(reference_folder("qwen3"), tmp_path / "engine", ExportOptions(max_lora_rank=8))
    asked = ["--engine", str(tmp_path / "engine")]
    assert "up to rank 8" in CliRunner().invoke(check, asked).output
    report = json.loads(CliRunner().invoke(check, [*asked, "--json"]).output)
    assert report["max_lora_rank"] == 8


def test_a_refusal_is_a_failure_with_the_reason(
    tiny_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hearth.daemon.check.available_memory", lambda: 1)
    arguments = ["--engine", str(tiny_engine)]
    with pytest.raises(Failure, match="cannot be served: 1 row of 96 tokens would take"):
        CliRunner().invoke(check, arguments, standalone_mode=False, catch_exceptions=False)
    result = CliRunner().invoke(check, [*arguments, "--json"], standalone_mode=False)
    assert result.return_value == 1
    assert "free some, or export" in json.loads(result.output)["reason"]


def test_programs_learn_the_code_and_field_when_nothing_can_be_reported(tmp_path: Path) -> None:
    arguments = ["--engine", str(tmp_path), "--json"]
    result = CliRunner().invoke(check, arguments, standalone_mode=False)
    assert result.return_value == 1
    report = json.loads(result.output)
    assert (report["ok"], report["code"]) == (False, "engine_missing")


def test_the_answer_is_compared_when_it_is_asked_for(tiny_engine: Path) -> None:
    asked = ["--engine", str(tiny_engine), "--answer"]
    result = CliRunner().invoke(check, asked)
    assert (result.exit_code, "right: " in result.output) == (0, True)
    assert "came out as they were computed" in " ".join(result.output.split())
    report = json.loads(CliRunner().invoke(check, [*asked, "--json"]).output)
    assert report["answer"] == "right"
    assert 0 < report["answer_report"]["error"] < report["answer_report"]["tolerance"]
    result = CliRunner().invoke(check, asked[:-1])
    assert "not compared" in result.output


def test_an_engine_of_an_older_hearth_is_told_of(tmp_path: Path, tiny_engine: Path) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(tiny_engine, engine)
    asked = ["--engine", str(engine)]
    assert "warning" not in CliRunner().invoke(check, asked).output
    write_config(engine, structs.replace(load_config(engine), engine_format=1))
    result = CliRunner().invoke(check, asked)
    words = " ".join(result.output.split())
    assert (result.exit_code, "run hearth export again on qwen3" in words) == (0, True)
    report = json.loads(CliRunner().invoke(check, [*asked, "--json"]).output)
    assert report["outdated"].startswith("an older Hearth exported this engine")


def test_old_names_are_taken_and_told_of(tmp_path: Path, tiny_engine: Path) -> None:
    file = tmp_path / "h.toml"
    file.write_text("drafting_top_k = 0")
    asked = ["--engine", str(tiny_engine), "--config", str(file)]
    result = CliRunner().invoke(check, asked)
    words = " ".join(result.output.split())
    assert (result.exit_code, "warning drafting_top_k, drafting_step" in words) == (0, True)
    assert 'give draft_tree = ""' in words
    file.write_text("drafting_top_k = 4")
    refused = CliRunner().invoke(check, [*asked, "--draft-tree", "1x2/3"])
    assert isinstance(refused.exception, HearthError)
    assert refused.exception.message.startswith(f"{file}, drafting_top_k: draft_tree is given")


def test_a_simulated_engine_has_no_answer_to_compare(tiny_engine: Path) -> None:
    arguments = ["--engine", str(tiny_engine), "--engine-kind", "simulated", "--answer", "--json"]
    result = CliRunner().invoke(check, arguments)
    report = json.loads(result.output)
    assert (report["ok"], report["answer"]) == (True, "none")


def test_a_wrong_answer_cannot_be_served(tiny_engine: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_engine, tmp_path / "engine")
    answer = json.loads((folder / ANSWER_FILE).read_text())
    answer["leads"][15] += 1
    (folder / ANSWER_FILE).write_text(json.dumps(answer))
    config = load_config(folder)
    write_config(folder, structs.replace(config, files=record_files(folder)))
    arguments = ["--engine", str(folder), "--answer"]
    with pytest.raises(Failure, match="does not compute its model"):
        CliRunner().invoke(check, arguments, standalone_mode=False, catch_exceptions=False)
    result = CliRunner().invoke(check, [*arguments, "--json"], standalone_mode=False)
    report = json.loads(result.output)
    assert result.return_value == 1
    assert (report["ok"], report["code"], report["answer"]) == (False, "wrong_answer", "wrong")


def test_what_does_not_fit_is_not_loaded(
    tiny_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hearth.daemon.check.available_memory", lambda: 1)
    arguments = ["--engine", str(tiny_engine), "--answer", "--json"]
    result = CliRunner().invoke(check, arguments, standalone_mode=False)
    assert json.loads(result.output)["answer"] == "not compared"


def test_a_plan_and_its_gpu_are_in_the_table(tiny_engine: Path) -> None:
    cpu = inspect_engine(Settings(), tiny_engine)
    report = structs.replace(
        cpu, device="cuda", gpu=GPU, plan=GPU_PLAN, host_memory={"pinned": 2048}
    )
    rows = dict(_rows(report))
    assert rows["device"] == "Some GPU, compute capability 9.0, driver for CUDA 13.0"
    assert rows["plan built by"] == "TensorRT 10.16.1"
    assert rows["plan built for"] == "Some GPU, compute capability 9.0"
    assert rows["host memory: pinned"] == "2.0 KiB"
    assert "no GPU" in dict(_rows(structs.replace(report, gpu=None)))["device"]
    assert "plan built by" not in dict(_rows(cpu))


def test_a_plan_of_rtx_is_for_every_gpu_that_it_serves(tiny_engine: Path) -> None:
    plan = structs.replace(GPU_PLAN, builder="tensorrt_rtx", gpu_name="", compute_capability="")
    rows = dict(_rows(structs.replace(inspect_engine(Settings(), tiny_engine), plan=plan)))
    known = "any GPU of compute capability 8.0, 8.6, 8.9, or 12.0 and newer"
    assert rows["plan built for"] == known


def test_bindings_are_listed_with_their_shapes(tiny_engine: Path) -> None:
    asked = ["--engine", str(tiny_engine), "--bindings"]
    result = CliRunner().invoke(check, asked)
    lines = [line.split(maxsplit=1) for line in result.output.splitlines() if "; " in line]
    rows = {line[0]: line[1].split("; ") for line in lines}
    embeddings = rows["inputs_embeds"]
    assert embeddings[0] == "float32"
    assert len(embeddings) == 3
    assert embeddings[1].startswith("1x1x")
    report = json.loads(CliRunner().invoke(check, [*asked, "--json"]).output)
    bound = {one["name"]: one for one in report["bindings"]}
    assert "rope_cos" in bound
    assert bound["rope_cos"]["shapes"] == []
    assert bound["logits"]["dtype"] == "float32"
    smallest, typical, largest = bound["inputs_embeds"]["shapes"][0]
    assert smallest <= typical <= largest
    plain = json.loads(CliRunner().invoke(check, [*asked[:2], "--json"]).output)
    assert plain["bindings"] is None


def test_kernels_and_their_compiler_are_in_the_table(tiny_engine: Path) -> None:
    report = structs.replace(
        inspect_engine(Settings(), tiny_engine), engine_kind="kernels", library="NVRTC 13.0"
    )
    said = {None: "", KernelCache(wanted=9, compiled=9): ": all 9 are there"}
    said[KernelCache(wanted=9, compiled=4)] = ": 4 of 9 are there, the others take a first start"
    for kernels, more in said.items():
        rows = dict(_rows(structs.replace(report, kernels=kernels)))
        assert rows["runs on"] == f"Hearth's own kernels, compiled by NVRTC 13.0{more}"


def test_programs_learn_of_a_wrong_settings_file_too(tmp_path: Path) -> None:
    path = tmp_path / "h.toml"
    path.write_text("engin = 'x'")
    result = CliRunner().invoke(check, ["--config", str(path), "--json"], standalone_mode=False)
    assert result.return_value == 1
    report = json.loads(result.output)
    assert (report["ok"], report["code"], report["field"]) == (False, "invalid_value", "engin")


def test_kernels_are_compiled_for_a_gpu_that_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ExportOptions(backend="kernels", device="cuda", dtype="float16", capacity=64)
    export_model(reference_folder("qwen3"), tmp_path / "engine", options)
    asked = []

    def compiled(folder: Path, _deployment: object, targets: list[Target], *_: object) -> object:
        asked.append((folder, [one.facts.multiprocessors for one in targets]))
        return KernelCache(wanted=9, compiled=9)

    monkeypatch.setattr("hearth.daemon.cli.check.compile_kernels", compiled)
    arguments = ["--engine", str(tmp_path / "engine"), "--compile-for", "8.7:8"]
    result = CliRunner().invoke(check, [*arguments, "--compile-for", "9.0:132"])
    assert (result.exit_code, "9 kernels are there" in result.output) == (0, True)
    assert asked == [(tmp_path / "engine", [8, 132])]
    found = json.loads(CliRunner().invoke(check, [*arguments, "--json"]).output)
    assert found == {"ok": True, "kernels": {"wanted": 9, "compiled": 9}}
    wrong = CliRunner().invoke(check, [*arguments, "--answer"])
    assert wrong.exit_code == 2


@pytest.mark.parametrize("option", [["--compile"], ["--compile-for", "8.7:8"]])
def test_an_engine_without_kernels_has_none_to_compile(
    tiny_engine: Path, option: list[str]
) -> None:
    arguments = ["--engine", str(tiny_engine), *option, "--json"]
    result = CliRunner().invoke(check, arguments, standalone_mode=False)
    assert json.loads(result.output)["code"] == "unsupported_option"


def run(*arguments: object) -> Result:
    given = [str(one) for one in arguments]
    return CliRunner().invoke(weights, given, standalone_mode=False, catch_exceptions=False)


@needs_other_weights
def test_weights_are_written_for_an_engine(tmp_path: Path) -> None:
    engine, file = tmp_path / "engine", tmp_path / "new" / "tuned.safetensors"
    arguments = [str(REFERENCE), str(engine), "--external-weights"]
    CliRunner().invoke(export, arguments, standalone_mode=False, catch_exceptions=False)
    result = run(REFERENCE, file, "--engine", engine)
    assert file.read_bytes() == (engine / "weights.safetensors").read_bytes()
    assert f"--engine {engine} --weights {file}" in result.stderr.replace("\n", "")
    settings = settings_of(weights=str(file), threads=1)
    report = with_answer(inspect_engine(settings, engine), settings, engine)
    assert (report.weights, report.answer) == (REFERENCE.name, "right")
    asked = [str(engine), "--weights", str(tmp_path / "none"), "--ids", "1,2"]
    with pytest.raises(HearthError) as caught:
        CliRunner().invoke(generate, asked, standalone_mode=False, catch_exceptions=False)
    assert (caught.value.code, caught.value.field) == ("weights_invalid", "none")
    with pytest.raises(HearthError) as caught:
        run(REFERENCE, file, "--engine", tmp_path / "none")
    assert caught.value.code == "engine_missing"

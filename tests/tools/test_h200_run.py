"""The script without a GPU: its pieces, its limits and what it would run."""

import os
import sys
from pathlib import Path

import pytest

from tools.gpu import h200_run
from tools.gpu.h200_run import DEFAULT, PARTS, Run, environment, join, main, run_part


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path, tmp_path / "h200.json", "/a/python", ["tensorrt/0.6b=/b"], "sanitizer")


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_pieces_become_one_wheel_in_their_order(tmp_path: Path) -> None:
    pieces = tmp_path / "in"
    pieces.mkdir()
    for number in (1, 0, 2):
        (pieces / f"a-1.0-py3-none-any.whl.0{number}").write_bytes(b"abc"[number : number + 1])
    whole = join(pieces, tmp_path / "out")
    assert whole.name == "a-1.0-py3-none-any.whl"
    assert whole.read_bytes() == b"abc"


@pytest.mark.parametrize("names", [[], ["a.whl.00", "b.whl.01"], ["a.whl.00", "a.whl.02"]])
def test_missing_or_mixed_pieces_are_refused(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match="pieces of one wheel"):
        join(tmp_path, tmp_path / "out")


def test_benches_record_and_take_what_is_ready(run: Run) -> None:
    (command,) = PARTS["decode-4b-ort"](run)
    assert command[command.index("--record") + 1] == str(run.record)
    assert command[command.index("--ready") + 1] == "tensorrt/0.6b=/b"
    assert command[command.index("--builder-python") + 1] == "/a/python"
    assert [command[i + 1] for i, word in enumerate(command) if word == "--case"] == [
        "4b/b1",
        "4b/b8",
    ]
    assert command[command.index("--engine") + 1] == "ort-cuda"


def test_a_plan_is_made_where_the_bench_looks_for_it(run: Run) -> None:
    (plan,) = PARTS["plan-0.6b"](run)
    (decode,) = PARTS["decode-0.6b"](run)
    for option in ("--cache", "--builder-python"):
        assert plan[plan.index(option) + 1] == decode[decode.index(option) + 1]


def test_other_benches_use_the_engine_of_the_decode_bench(run: Run) -> None:
    folder = run.work / "bench" / "qwen3-0.6b-pooled-onnxruntime-float16-abc"
    folder.mkdir(parents=True)
    plan = folder.with_name("qwen3-0.6b-pooled-tensorrt-float16-abc")
    plan.mkdir()
    kernels = folder.with_name("qwen3-0.6b-shape-kernels-float16-abc")
    kernels.mkdir()
    for part, folders in (
        ("memory", [folder, plan]),
        ("check", [folder]),
        ("arrivals", [folder]),
        ("graphs", [kernels]),
    ):
        engines = [command[command.index("--engine") + 1] for command in PARTS[part](run)]
        assert engines == [str(one) for one in folders]


def test_speculation_is_compared_with_an_engine_without_a_draft(run: Run) -> None:
    plain, drafted, contest, memory, graphs = PARTS["spec"](run)
    assert "--draft" in drafted
    assert "--draft" not in plain
    for command, flag, target in (
        (contest, "--engine", drafted),
        (contest, "--plain", plain),
        (memory, "--engine", drafted),
        (graphs, "--engine", drafted),
    ):
        assert command[command.index(flag) + 1] in target
    for command in (contest, memory, graphs):
        assert command[command.index("--record") + 1] == str(run.record)


def test_the_figures_of_speculation_have_a_file_of_their_own(run: Run) -> None:
    *_, contest, memory, graphs = PARTS["spec"](run._replace(record=h200_run.FIGURES))
    for command in (contest, memory, graphs):
        assert Path(command[command.index("--record") + 1]).name == "h200-ort-spec.json"


def test_every_part_has_commands_and_the_default_is_known(run: Run) -> None:
    assert set(DEFAULT) <= set(PARTS)
    for part in PARTS.values():
        assert all(command[0] for command in part(run))


def test_a_part_goes_on_after_a_failure_and_keeps_its_code(tmp_path: Path) -> None:
    made = tmp_path / "made"
    commands = [script("raise SystemExit(3)"), script(f"open({str(made)!r}, 'w')")]
    assert run_part(commands, dict(os.environ), 30) == 3
    assert made.exists()


def test_a_part_out_of_time_is_ended() -> None:
    assert run_part([script("import time; time.sleep(60)")], dict(os.environ), 0.5) == 124


def test_a_program_that_is_missing_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_part([["no-such-program"]], dict(os.environ), 5) == 127
    assert "no-such-program cannot be run" in capsys.readouterr().err


def test_the_commit_travels_in_the_environment(tmp_path: Path) -> None:
    environ = environment(tmp_path / "site", "abc")
    assert environ["BENCH_COMMIT"] == "abc"
    assert environ["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path / "site")


def test_commands_find_the_packages_of_the_tree_where_nothing_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    # -S: without what is installed beside the interpreter.
    command = [sys.executable, "-S", "-c", "import hearth, tools"]
    assert run_part([command], environment(tmp_path / "site", ""), 30) == 0


def test_the_parts_asked_for_run_and_the_first_failure_is_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PARTS, "tests", lambda _: [script("raise SystemExit(4)")])
    monkeypatch.setitem(PARTS, "ops", lambda _: [script("pass")])
    assert main(["--part", "tests", "--part", "ops", "--work", str(tmp_path)]) == 4
    said = capsys.readouterr().err
    assert "part tests: 4" in said
    assert "part ops: 0" in said
    assert h200_run.PART_LIMIT_S < 600


def test_the_step_has_a_file_of_its_own(run: Run) -> None:
    everywhere = run._replace(record=h200_run.FIGURES)
    for name in (name for name in PARTS if name.startswith("step-")):
        file = h200_run.PROFILES if name == "step-profile" else h200_run.STEP_FIGURES
        for command in PARTS[name](everywhere):
            if "--record" in command:
                assert command[command.index("--record") + 1] == str(file)
    decode, compare = PARTS["step-0.6b"](run)
    assert compare[-2:] == [str(run.record), str(h200_run.FIGURES)]
    assert decode[decode.index("--daemon") + 1] == "kernels"


def test_files_of_the_step_are_made_where_its_parts_look_for_them(run: Run) -> None:
    plain, drafted, *made = PARTS["step-files"](run)
    (more,) = PARTS["step-files-ort"](run)
    assert plain[plain.index("--backend") + 1] == "kernels"
    assert drafted[-2] == "--draft"
    (contest,) = PARTS["step-spec"](run)
    assert contest[contest.index("--name") + 1] == "spec"
    for flag, engine in (("--engine", drafted), ("--plain", plain)):
        assert contest[contest.index(flag) + 1] in engine
    for files, part in zip(made, ("step-0.6b", "step-4b"), strict=True):
        decode, _ = PARTS[part](run)
        assert decode[decode.index("--cache") + 1] == files[files.index("--cache") + 1]
        engines = values(files, "--engine") + (values(more, "--engine") if "4b" in files else [])
        assert values(decode, "--engine") == engines
        assert engines[-1] == "ort-cuda"
        assert ("--llama" in files) == ("llama_cpp" in values(decode, "--peer"))


def values(command: list[str], option: str) -> list[str]:
    return [command[at + 1] for at, word in enumerate(command) if word == option]


def test_every_file_that_needs_a_gpu_is_in_the_suite_twice(run: Run) -> None:
    shared, alone = PARTS["tests"](run)
    assert "gpu and not whole_gpu" in shared
    assert "whole_gpu" in alone
    for command in (shared, alone):
        assert "tests/gpu/test_kernels.py" in command
        assert "tests/runtime/runner/test_prompt_graphs.py" in command
        assert "tests/runtime/device/cuda/test_walks.py" in command


def test_the_libraries_of_llama_cpp_are_found(tmp_path: Path) -> None:
    environ = environment(tmp_path / "site", "", tmp_path / "llama")
    assert environ["LLAMA_CPP_LIB_PATH"] == str(tmp_path / "llama")
    assert environ["LD_LIBRARY_PATH"].split(os.pathsep)[0] == str(tmp_path / "llama")
    assert "LLAMA_CPP_LIB_PATH" not in environment(tmp_path / "site", "")


def test_commands_of_a_part_may_run_at_once(tmp_path: Path) -> None:
    waiting = "import pathlib, time\nwhile not pathlib.Path({!r}).exists(): time.sleep(0.01)"
    there = str(tmp_path / "there")
    commands = [script(waiting.format(there)), script(f"open({there!r}, 'w')")]
    assert run_part(commands, dict(os.environ), 30, together=True) == 0

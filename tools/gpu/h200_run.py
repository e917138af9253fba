"""The run on a GPU whose figures the repository keeps: `python -m tools.gpu.h200_run`.

For a machine without a network: `--wheel` names wheels, whole or the folder of the pieces of one
(`split`), which are installed beside the interpreter's own packages, `--llama` a folder with the
libraries of llama.cpp. Each part is a list of commands with less than ten minutes together, so that
a machine lent for minutes can run them one by one: `--part decode-0.6b --part graphs`. What a part
leaves in `--work` serves the next; `--part step-files` needs no GPU.

The figures go to `--record` (docs/figures/h200.json, of the parts `spec`, `vision` and `step-...`
h200-ort-spec.json, h200-vision.json and h200-step.json), merged by key. The exit code is that of
the first command that failed; the parts behind it run all the same.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures" / "h200.json"
SPEC_FIGURES = FIGURES.with_name("h200-ort-spec.json")
VISION_FIGURES = FIGURES.with_name("h200-vision.json")
STEP_FIGURES = FIGURES.with_name("h200-step.json")
PROFILES = FIGURES.with_name("h200-profile.json")
MODEL, DRAFT = ROOT / "models" / "home", ROOT / "models" / "home-draft"
# The machine may lack the plugins that the project's settings of pytest speak of.
_PLAIN = ("-o", "addopts=", "-o", "filterwarnings=", "-o", "anyio_mode=")
_QUIET = ("-p", "no:cacheprovider", "-p", "no:benchmark", "--durations", "20", "--tb", "short")
_PYTEST = ("-m", "pytest", "-v", *_QUIET, *_PLAIN, "--timeout", "300")
# Processes share the GPU, and each has much to do beside it.
_SHARDS = ("-n", str(max(1, len(os.sched_getaffinity(0)) - 1)), "--dist", "worksteal")
_MARK = "pytest.mark.gpu"


class Run(NamedTuple):
    """Surroundings of every part: where it works, the record, the builder's interpreter."""

    work: Path
    record: Path
    builder_python: str
    ready: Sequence[str]
    sanitizer: str

    def bench(self, *arguments: str, record: Path = FIGURES) -> list[str]:
        """A bench that records its figures, unless `record` is another file."""
        return [sys.executable, "-m", "bench", *arguments, "--record", self.file(record)]

    def tool(self, module: str, *arguments: str, record: Path = FIGURES) -> list[str]:
        """A study tool that records its figures likewise."""
        command = [sys.executable, "-m", f"tools.{module}", *arguments]
        return [*command, "--record", self.file(record)]

    def file(self, record: Path) -> str:
        """File for figures of `record`; profiles, which are of many commits, stay apart."""
        if self.record == FIGURES:
            return str(record)
        return str(self.record.with_name(record.name) if record == PROFILES else self.record)

    def decode(self, *arguments: str) -> list[str]:
        """`bench decode` on the GPU, with the folders that are ready."""
        ready = [part for text in self.ready for part in ("--ready", text)]
        builder = ["--builder-python", self.builder_python]
        cache = ["--cache", str(self.work / "bench")]
        return self.bench("decode", "--device", "cuda", *arguments, *builder, *cache, *ready)

    def step(self, *arguments: str) -> list[list[str]]:
        """`bench decode` of the step's figures: kernels and their peers, what is chosen of them.

        Peers that are not measured are those of the record of all engines.
        """
        cache = ["--cache", str(self.work / "bench")]
        compare = [sys.executable, "-m", "tools.compare_earlier", self.file(STEP_FIGURES)]
        return [
            self.bench("decode", "--device", "cuda", *arguments, *cache, record=STEP_FIGURES),
            [*compare, str(FIGURES)],
        ]

    def engine(self, kind: str = "onnxruntime", name: str = "0.6b-pooled") -> str:
        """An engine folder of a model, made by the decode bench or the part before it."""
        made = sorted((self.work / "bench").glob(f"qwen3-{name}-{kind}-*"))
        return str(made[0]) if made else str(self.work / "bench" / "run decode-0.6b first")

    def files(self, model: str, *flags: str) -> list[str]:
        """The command that makes what `decode` wants of a model."""
        make = [sys.executable, "-m", "tools.gpu.bench_engine", model, *flags]
        return [*make, "--cache", str(self.work / "bench"), "--builder-python", self.builder_python]


_KERNELS = ("kernels", "kernels-int4", "kernels-int8")
_LLAMA = ("--peer", "llama_cpp")
_COMPILED = (*_LLAMA, "--peer", "torch_compile")
Commands = Callable[[Run], list[list[str]]]


def _tests(_: Run) -> list[list[str]]:
    """The whole suite: what may share the GPU, then what looks at its free memory."""
    marked = sorted((ROOT / "tests").rglob("test_*.py"))
    files = [str(path.relative_to(ROOT)) for path in marked if _MARK in path.read_text()]
    suite = [sys.executable, *_PYTEST]
    return [
        [*suite, *_SHARDS, "-m", "gpu and not whole_gpu", *files],
        [*suite, "-m", "whole_gpu", *files],
    ]


def _sanitizer(tools: str, *programs: str) -> Commands:
    python = ("--error-exitcode", "9", sys.executable, "-m")
    return lambda run: [
        [run.sanitizer, "--tool", tool, *python, *program.split()]
        for program in programs
        for tool in tools.split()
    ]


def _decode(model: str, *flags: str) -> Commands:
    cases = [part for batch in (1, 8) for part in ("--case", f"{model}/b{batch}")]
    return lambda run: [run.decode(*cases, *flags)]


def _plan(model: str) -> Commands:
    return lambda run: [run.files(model)]


def _graphs(run: Run) -> list[list[str]]:
    return [run.tool("graphs", "--engine", run.engine("kernels-float16", "0.6b-shape"))]


def _memory(run: Run) -> list[list[str]]:
    return [
        run.bench("memory", "--engine", run.engine(kind), "--name", f"memory/{name}/0.6b")
        for kind, name in (("onnxruntime", "ort-cuda"), ("tensorrt", "tensorrt"))
    ]


def _arrivals(run: Run) -> list[list[str]]:
    """Requests that come at random, joining and synchronous: as many steps as in 120 s on a CPU."""
    flags = ["--arrivals", "poisson", "--seconds", "30", "--engine", run.engine()]
    return [run.bench("load", *flags, "--name", "load/ort-cuda/0.6b")]


def _check(run: Run) -> list[list[str]]:
    return [[sys.executable, "-m", "hearth.daemon.cli", "check", "--engine", run.engine()]]


def _spec(run: Run) -> list[list[str]]:
    """Speculation on the shipped model: the bench, and the memory of both engines."""
    plain, drafted = run.work / "spec" / "plain", run.work / "spec" / "drafted"
    shutil.rmtree(run.work / "spec", ignore_errors=True)
    contest = ["spec", "--engine", str(drafted), "--plain", str(plain)]
    memory = ["memory", "--engine", str(drafted), "--name", "memory/ort-cuda/home-draft"]
    graphs = ["--engine", str(drafted), "--speculation"]
    return [
        _export(plain),
        _export(drafted, "--draft", str(DRAFT)),
        run.bench(*contest, "--device", "cuda", record=SPEC_FIGURES),
        run.bench(*memory, record=SPEC_FIGURES),
        run.tool("graphs", *graphs, record=SPEC_FIGURES),
    ]


def _step(names: str, *flags: str, daemons: Sequence[str] = ("none",)) -> Commands:
    """Decode steps of these cases, by the engines that `names` has behind them."""
    cases, engines = ([*part.split()] for part in names.split(":"))
    chosen = {"--case": cases, "--engine": engines, "--daemon": daemons}
    words = [word for option, values in chosen.items() for one in values for word in (option, one)]
    return lambda run: run.step(*words, *flags)


def _step_files(run: Run) -> list[list[str]]:
    """Files that the parts of the step need, made all at once, without a GPU."""
    plain, drafted = run.work / "step" / "plain", run.work / "step" / "drafted"
    shutil.rmtree(run.work / "step", ignore_errors=True)
    (run.work / "bench").mkdir(parents=True, exist_ok=True)
    models = {"0.6b": (*_KERNELS, "ort-cuda"), "4b": _KERNELS[:2]}
    return [
        _export(plain, backend="kernels"),
        _export(drafted, "--draft", str(DRAFT), backend="kernels"),
        *(
            run.files(model, "--llama", *(word for one in engines for word in ("--engine", one)))
            for model, engines in models.items()
        ),
    ]


def _step_files_ort(run: Run) -> list[list[str]]:
    """ONNX Runtime's 4B, whose checkpoint and export take a minute of one core."""
    return [run.files("4b", "--engine", "ort-cuda")]


def _step_compile(run: Run) -> list[list[str]]:
    """Kernels that the other parts of the step compile, at once and beside anything; no figures."""
    module = [sys.executable, "-m"]
    widths = [*module, "tools.widths", "--cache", str(run.work / "bench")]
    folders = [
        run.engine(f"{kind}-float16", f"{model}-shape")
        for kind in _KERNELS
        for model in (("0.6b",) if kind == _KERNELS[2] else ("0.6b", "4b"))
    ]
    return [
        *(
            [*module, "bench", "memory", "--engine", one]
            for one in (*folders, str(run.work / "step" / "drafted"))
        ),
        *([*widths, "--model", one, "--engine", "kernels"] for one in ("0.6b", "4b")),
        [*module, "tools.gpu.kernel_times", "--profile", "0.6b", "0.6b-int4"],
        *([*module, "tools.gpu.kernel_adapter_times", model] for model in ("0.6b", "4b")),
        [*module, "tools.gpu.kernel_sanitize"],
    ]


def _step_spec(run: Run) -> list[list[str]]:
    """Speculation on the shipped model by kernels."""
    plain, drafted = run.work / "step" / "plain", run.work / "step" / "drafted"
    contest = ["spec", "--engine", str(drafted), "--plain", str(plain), "--name", "spec"]
    cases = [word for batch in (1, 8) for word in ("--case", f"kernels/b{batch}")]
    return [run.bench(*contest, *cases, "--device", "cuda", record=STEP_FIGURES)]


def _step_memory(run: Run) -> list[list[str]]:
    """Predicted against measured memory of kernels, and of those with a draft."""
    engines = {
        f"{model}": run.engine("kernels-float16", f"{model}-shape") for model in ("0.6b", "4b")
    }
    engines["home-draft"] = str(run.work / "step" / "drafted")
    return [
        run.bench(
            "memory", "--engine", engine, "--name", f"memory/kernels/{name}", record=STEP_FIGURES
        )
        for name, engine in engines.items()
    ]


def _step_start(run: Run) -> list[list[str]]:
    """From the start of a daemon to its first token, kernels compiled before and on two cores."""
    engine = run.engine("kernels-float16", "4b-shape")
    return [run.tool("gpu.first_answer", engine, record=STEP_FIGURES)]


def _step_profile(run: Run) -> list[list[str]]:
    return [run.tool("gpu.kernel_profile", record=PROFILES)]


def _step_adapters(run: Run) -> list[list[str]]:
    return [run.tool("gpu.kernel_adapter_times", "0.6b", "4b", record=STEP_FIGURES)]


def _widths(model: str, *flags: str) -> Commands:
    words = ("--model", model, *flags, "--cache")
    return lambda run: [run.tool("widths", *words, str(run.work / "bench"), record=STEP_FIGURES)]


def _vision(run: Run) -> list[list[str]]:
    """Pictures by stage, beside transformers."""
    cache = ["--cache", str(run.work / "bench")]
    return [run.bench("vision", "--device", "cuda", *cache, record=VISION_FIGURES)]


def _export(target: Path, *flags: str, backend: str = "onnxruntime") -> list[str]:
    export = [sys.executable, "-m", "hearth.daemon.cli", "export", str(MODEL), str(target)]
    engine = ["--backend", backend, "--device", "cuda", "--dtype", "float16"]
    return [*export, *engine, "--capacity", "1024", *flags]


def _ops(_: Run) -> list[list[str]]:
    return [[sys.executable, "-m", "tools.cuda_ops"]]


PARTS: dict[str, Commands] = {
    "tests": _tests,
    "sanitizer": _sanitizer("memcheck racecheck initcheck", "tests.runtime.device.cuda.sanitize"),
    "ops": _ops,
    "plan-0.6b": _plan("0.6b"),
    "decode-0.6b": _decode("0.6b"),
    "decode-0.6b-ort": _decode("0.6b", "--engine", "ort-cuda"),
    "decode-4b": _decode("4b"),
    "decode-4b-ort": _decode("4b", "--engine", "ort-cuda"),
    "check": _check,
    "graphs": _graphs,
    "memory": _memory,
    "arrivals": _arrivals,
    "spec": _spec,
    "vision": _vision,
    "step-files": _step_files,
    "step-compile": _step_compile,
    "step-files-ort": _step_files_ort,
    "step-0.6b": _step(
        "0.6b/b1 0.6b/b8 0.6b/b1/1000 0.6b/b8/1000 : kernels kernels-int4 kernels-int8 ort-cuda",
        *_LLAMA,
        daemons=["kernels"],
    ),
    "step-widths": _widths("0.6b"),
    "step-spec": _step_spec,
    "step-4b": _step("4b/b1 : kernels kernels-int4 ort-cuda", *_LLAMA),
    "step-start": _step_start,
    "step-memory": _step_memory,
    "step-adapters": _step_adapters,
    "step-widths-4b": _widths("4b"),
    "step-compiled": _step("0.6b/b1 0.6b/b8 4b/b1 : kernels kernels-int4", *_COMPILED),
    "step-4b-more": _step("4b/b8 4b/b1/1000 4b/b8/1000 : kernels kernels-int4", *_LLAMA),
    "step-profile": _step_profile,
    "step-sanitizer": _sanitizer(
        "memcheck racecheck synccheck",
        "tools.gpu.kernel_sanitize",
        "tools.gpu.kernel_sanitize large",
    ),
}
TOGETHER = frozenset({"step-files", "step-compile", "sanitizer", "step-sanitizer"})
"""Parts whose commands run at the same time."""
DEFAULT = (
    "tests",
    "sanitizer",
    "ops",
    "plan-0.6b",
    "decode-0.6b",
    "decode-4b-ort",
    "check",
    "graphs",
    "memory",
    "arrivals",
)


PART_LIMIT_S = 570.0
_LAST_WORDS_S = 10.0
_SITE, _PIECES = "site", "pieces"


def install(wheels: Sequence[Path], work: Path) -> Path:
    """Install wheels, and wheels in pieces, into a folder of `work` and return it."""
    site, joined = work / _SITE, work / _PIECES
    whole = [join(path, joined) if path.is_dir() else path for path in wheels]
    if whole:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        files = [str(path) for path in whole]
        subprocess.run([*pip, "--upgrade", "--target", str(site), *files], check=True)  # noqa: S603 - the interpreter's own pip
    return site


def join(pieces: Path, target: Path) -> Path:
    """Put `NAME.whl.00`, `NAME.whl.01`, ... of a folder together; raises ValueError for others."""
    files = sorted(path for path in pieces.iterdir() if path.suffix[1:].isdigit())
    names = {path.with_suffix("").name for path in files}
    if len(names) != 1 or [int(path.suffix[1:]) for path in files] != list(range(len(files))):
        raise ValueError(f"{pieces} does not hold the pieces of one wheel, from 00 on")
    target.mkdir(parents=True, exist_ok=True)
    whole = target / names.pop()
    with whole.open("wb") as out:
        for path in files:
            with path.open("rb") as piece:
                shutil.copyfileobj(piece, out)
    return whole


def run_part(
    commands: Sequence[Sequence[str]],
    environ: Mapping[str, str],
    limit_s: float,
    *,
    together: bool = False,
) -> int:
    """Run commands, in turn or at once; the first exit code other than 0, 124 out of time."""
    deadline = time.monotonic() + limit_s
    with ThreadPoolExecutor(len(commands) if together else 1) as pool:
        codes = pool.map(lambda command: _run_one(command, environ, deadline), commands)
        return next((code for code in [*codes] if code), 0)


def _run_one(command: Sequence[str], environ: Mapping[str, str], deadline: float) -> int:
    try:
        process = subprocess.Popen(command, cwd=ROOT, env=dict(environ))  # noqa: S603 - a part's own
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be run: {error}\n")
        return 127
    with process:
        try:
            return process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            # As from a keyboard: pytest tells then what has failed so far.
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_WORDS_S)
            process.kill()
            return 124


def environment(site: Path, commit: str, llama: Path | None = None) -> dict[str, str]:
    """The environment of every part; libraries of CUDA's packages are found by all others."""
    tree = (ROOT / "src", ROOT / "clients" / "python", ROOT)
    paths = [str(path) for path in (site, *tree)]
    libraries = sorted(Path(sysconfig.get_path("purelib"), "nvidia").glob("*/lib"))
    known = {"BENCH_COMMIT": commit} if commit else {}
    if llama is not None:
        known["LLAMA_CPP_LIB_PATH"] = str(llama)
        libraries.insert(0, llama)
    for name, first in (("PYTHONPATH", paths), ("LD_LIBRARY_PATH", map(str, libraries))):
        known[name] = os.pathsep.join([*first, os.environ.get(name, "")]).strip(os.pathsep)
    return {**os.environ, **known}


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, run the parts that were asked for and say how each went."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--part", action="append", choices=list(PARTS), default=[])
    parser.add_argument("--wheel", action="append", type=Path, default=[])
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "hearth-h200")
    parser.add_argument("--record", type=Path, default=FIGURES)
    parser.add_argument("--commit", default="", help="where there is no repository")
    parser.add_argument("--builder-python", default=sys.executable)
    parser.add_argument("--ready", action="append", default=[], metavar="ENGINE/MODEL=DIR")
    parser.add_argument("--sanitizer", default="compute-sanitizer")
    parser.add_argument("--llama", type=Path, metavar="DIR")
    parser.add_argument("--limit", type=float, default=PART_LIMIT_S, help="seconds of a part")
    chosen = parser.parse_args(arguments)
    chosen.work.mkdir(parents=True, exist_ok=True)
    run = Run(chosen.work, chosen.record, chosen.builder_python, chosen.ready, chosen.sanitizer)
    environ = environment(install(chosen.wheel, chosen.work), chosen.commit, chosen.llama)
    codes: dict[str, int] = {}
    for name in chosen.part or DEFAULT:
        started = time.monotonic()
        together = name in TOGETHER
        codes[name] = run_part(PARTS[name](run), environ, chosen.limit, together=together)
        sys.stderr.write(f"part {name}: {codes[name]}, {time.monotonic() - started:.0f} s\n")
    return next((code for code in codes.values() if code), 0)


if __name__ == "__main__":
    sys.exit(main())

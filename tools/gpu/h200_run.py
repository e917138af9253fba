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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tools.gpu.h200_parts import DEFAULT, FIGURES, PARTS, ROOT, TOGETHER, Run

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

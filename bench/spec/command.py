"""The command `hearth bench spec`."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import click
import msgspec

from hearth.bench.report import Record, judged, note, print_cases, publish, record_option
from hearth.bench.spec.contest import (
    LEAST_SPEEDUP,
    MOST_OVER_DEARER,
    NEAR_TIE,
    MixedFigures,
    Progress,
    Replies,
    SpecFigures,
    VerifyFigures,
    compare,
    measure_contest,
    measure_mixed,
    replies,
)
from hearth.daemon.cli.console import progress_bar
from hearth.daemon.cli.errors import wrong_usage
from hearth.daemon.cli.options import json_option
from hearth.daemon.gpu_facts import gpu_facts
from hearth.daemon.shipped import SOURCE, engine_folder
from hearth.runtime.config import LLMEngineRunnerConfig, load_config
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.deployment import Method
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import (
    EagleDraftingConfig,
    RuntimeOptions,
    SpeculationOptions,
    check_speculation,
)
from hearth.runtime.text.tokenizer import Tokenizer

PREFIXES = ("cpu", "kernels", "ort-cuda", "tensorrt")
VERIFY_BATCHES = (1, 3, 8)
VERIFY_SHAPES = tuple(
    EagleDraftingConfig(drafting_top_k=top_k, drafting_step=step, verify_tree_size=nodes)
    for top_k, step, nodes in ((10, 6, 60), (4, 3, 16), (1, 4, 5), (8, 1, 9))
)
_EAGLE_BATCHES, _LOOKUP_BATCHES, _MIXED_BATCH = (1, 2, 4, 8), (1, 8), 8
_OFF = SpeculationOptions()


class SpecCase(NamedTuple):
    """A case; `mixed` times steps in which half of the rows speculate."""

    name: str
    kind: Literal["eagle", "lookup", "mixed"]
    batch: int


def spec_cases(prefix: str) -> dict[str, SpecCase]:
    """The cases of an engine, by name; those of a draft are named after what runs it."""
    found = [SpecCase(f"{prefix}/b{batch}", "eagle", batch) for batch in _EAGLE_BATCHES]
    found += [SpecCase(f"lookup/b{batch}", "lookup", batch) for batch in _LOOKUP_BATCHES]
    found.append(SpecCase(f"mixed/b{_MIXED_BATCH}", "mixed", _MIXED_BATCH))
    return {case.name: case for case in found}


ALL_CASES = tuple(dict.fromkeys(name for prefix in PREFIXES for name in spec_cases(prefix)))


def prefix_of(config: LLMEngineRunnerConfig) -> str:
    """Name of the cases of this engine's draft."""
    if config.device == "cpu":
        return "cpu"
    return "ort-cuda" if config.backend == "onnxruntime" else config.backend


def verified_shapes(config: LLMEngineRunnerConfig) -> tuple[EagleDraftingConfig, ...]:
    """The shapes that a base engine with a draft takes."""
    return tuple(
        shape for shape in VERIFY_SHAPES if shape.drafting_top_k == 1 or not config.chains_only
    )


def shape_name(shape: EagleDraftingConfig) -> str:
    """Top-k, steps and nodes: `10-6-60`."""
    return f"{shape.drafting_top_k}-{shape.drafting_step}-{shape.verify_tree_size}"


class SpecChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Choices of the caller; `plain` is the folder whose vanilla decoding is compared with."""

    engine: Path
    plain: Path
    shape: EagleDraftingConfig | None = None
    threads: int = 0
    prompts: int = 96
    max_tokens: int = 128
    repeats: int = 3


class SpecSession:
    """Runs cases, each prompt as token ids; `close` closes the engines."""

    def __init__(self, choice: SpecChoice, prompts: Sequence[list[int]]) -> None:
        self._choice = choice
        self._config = load_config(choice.engine)
        self._prompts = prompts
        self._sizes = {"max_tokens": choice.max_tokens, "repeats": choice.repeats}
        self._opened = ExitStack()
        self._runtimes: dict[tuple[Path, SpeculationOptions], LLMInferenceRuntime] = {}

    @classmethod
    def open(cls, choice: SpecChoice) -> "SpecSession":
        """A session on the held-out prompts."""
        tokenizer = Tokenizer.open(choice.engine)
        return cls(choice, encode_prompts(held_out_prompts(choice.prompts), tokenizer))

    def close(self) -> None:
        """Close all engines."""
        self._opened.close()

    def figures(self, case: SpecCase) -> SpecFigures | MixedFigures:
        """Measure a case; raises `invalid_value` where the engine is too small for it."""
        with progress_bar() as progress:
            show: Progress = partial(progress, case.name)
            return self._mixed(case, show) if case.kind == "mixed" else self._contest(case, show)

    def verify(self, sizes: Sequence[int] = VERIFY_BATCHES) -> dict[str, VerifyFigures]:
        """Compare greedy replies by method, tree shape and batch size."""
        methods = {"lookup": SpeculationOptions(method="lookup", adaptive=False)}
        if self._config.enable_eagle_spec_decode:
            shape = self._choice.shape
            for one in (shape,) if shape else verified_shapes(self._config):
                options = SpeculationOptions(method="eagle", eagle=one, adaptive=False)
                methods[shape_name(one)] = options
        found: dict[str, VerifyFigures] = {}
        for batch in sizes:
            vanilla = self._replies(f"vanilla/b{batch}", _OFF, batch, self._choice.plain)
            for name, options in methods.items():
                key = f"{name}/b{batch}"
                ours = self._replies(key, options, batch)
                found[key] = compare(ours, vanilla, NEAR_TIE[self._config.dtype])
        return found

    def _contest(self, case: SpecCase, show: Progress) -> SpecFigures:
        method: Method = "lookup" if case.kind == "lookup" else "eagle"
        speculating = self._runtime(SpeculationOptions(method=method, eagle=self._choice.shape))
        ways = self._runtime(_OFF, self._choice.plain), speculating
        found = measure_contest(ways, self._prompts, case.batch, progress=show, **self._sizes)
        return msgspec.structs.replace(found, dtype=self._config.dtype)

    def _mixed(self, case: SpecCase, show: Progress) -> MixedFigures:
        method: Method = "eagle" if self._config.enable_eagle_spec_decode else "lookup"
        options = SpeculationOptions(method=method, eagle=self._choice.shape, adaptive=False)
        runtime = self._runtime(options)
        return measure_mixed(runtime, self._prompts, case.batch, progress=show, **self._sizes)

    def _replies(
        self, name: str, options: SpeculationOptions, batch: int, folder: Path | None = None
    ) -> Replies:
        groups = -(-len(self._prompts) // batch)
        with progress_bar() as progress:
            ticks = iter(range(1, groups + 1))
            return replies(
                self._runtime(options, folder),
                self._prompts,
                batch,
                max_tokens=self._choice.max_tokens,
                logprobs=options.method == "off",
                tick=lambda: progress(name, next(ticks), groups),
            )

    def _runtime(
        self, speculation: SpeculationOptions, folder: Path | None = None
    ) -> LLMInferenceRuntime:
        key = folder or self._choice.engine, speculation
        if key not in self._runtimes:
            options = RuntimeOptions(
                threads=self._choice.threads, verify=False, speculation=speculation
            )
            runtime = LLMInferenceRuntime.open(key[0], options)
            self._opened.callback(runtime.close)
            runtime.capture(range(1, runtime.max_batch + 1))
            self._runtimes[key] = runtime
        return self._runtimes[key]


_PROGRAM = ("-m", "models.prompts")


class Turn(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str


class Prompt(msgspec.Struct, frozen=True):
    """A conversation that ends with a question, and the kind of question."""

    group: str
    messages: list[Turn]


def held_out_prompts(count: int) -> list[Prompt]:
    """`count` prompts, spread evenly over all that are held out; raises `invalid_value`.

    They are made by the program that makes the training data, which is beside the shipped model.
    """
    command, folder = [sys.executable, *_PROGRAM], SOURCE.parents[1]
    try:
        done = subprocess.run(command, capture_output=True, check=True, cwd=folder)  # noqa: S603 - fixed
    except (OSError, subprocess.CalledProcessError) as error:
        raise HearthError(
            "invalid_value", f"there are no prompts at {SOURCE.parent}: run it in the repository"
        ) from error
    return spread(msgspec.json.Decoder(Prompt).decode_lines(done.stdout), count)


def spread(prompts: list[Prompt], count: int) -> list[Prompt]:
    """`count` of the prompts at even distances; all of them where there are fewer."""
    count = min(count, len(prompts))
    return [prompts[place * len(prompts) // count] for place in range(count)]


def encode_prompts(prompts: list[Prompt], tokenizer: Tokenizer) -> list[list[int]]:
    """The token ids of each prompt with the chat template."""
    return [
        tokenizer.encode_pairs([(turn.role, turn.content) for turn in prompt.messages])
        for prompt in prompts
    ]


Figures = SpecFigures | MixedFigures
_FIELDS = (
    "accept_length speedup speedup_with_prefill vanilla_tokens_per_s tokens_per_s round_share "
    "vanilla_step_ms draft_ms verify_ms commit_ms equal_replies"
)
_VERIFY_FIELDS = "prompts equal near_ties failures largest_gap accept_length"
_PROMPTS, _VERIFIED_PROMPTS, _REPEATS = 96, 500, 3


@click.command()
@click.option(
    "--case",
    "names",
    multiple=True,
    type=click.Choice(ALL_CASES),
    metavar="NAME",
    help="Measure this case only; may be given more than once.  [all that the engine has]",
)
@click.option("--engine", default="", metavar="DIR", help="Engine folder.  [the shipped model]")
@click.option(
    "--plain",
    default="",
    metavar="DIR",
    help="The folder that decodes without speculation.  [the same]",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Refuse an engine of another.")
@click.option(
    "--tree",
    metavar="K,T,N",
    help="Top-k, steps and nodes of the draft's tree, such as 4,3,16.  [what suits the device]",
)
@click.option("--threads", type=click.IntRange(0, 1024), default=0, help="0 for all cores.  [0]")
@click.option(
    "--prompts",
    type=click.IntRange(8, 1200),
    help=f"Held-out prompts.  [{_PROMPTS}; {_VERIFIED_PROMPTS} with --verify]",
)
@click.option("--max-tokens", type=click.IntRange(2), default=128, show_default=True)
@click.option("--repeats", type=click.IntRange(1), help=f"Passes over the prompts.  [{_REPEATS}]")
@click.option(
    "--name",
    default="",
    metavar="NAME",
    help="What a draft's cases are called in the figures.  [what runs the engine]",
)
@click.option("--verify", is_flag=True, help="Compare the replies; measures nothing.")
@record_option
@json_option
def spec(
    *,
    names: tuple[str, ...],
    engine: str,
    plain: str,
    device: str | None,
    tree: str | None,
    prompts: int | None,
    record: Record,
    verify: bool,
    as_json: bool,
    threads: int,
    max_tokens: int,
    repeats: int | None,
    name: str,
) -> int:
    """Speculation against plain decoding on the held-out prompts of the shipped model.

    Both decode the same prompts greedily in this process and take turns. With --verify the
    replies of every tree shape, or that of --tree, and batch size are compared with plain
    decoding's. The exit code is 1 when a reply differs but for a near-tie, a case loses more than
    3%, or a mixed step costs more than 1.1 times the dearer kind.
    """
    if verify and (names or repeats):
        raise click.UsageError("--case and --repeats are for measuring, not for --verify")
    shape = _shape(tree)
    if device == "cuda" and not engine:
        gpu_facts()
    plain_folder = engine_folder(plain) if plain else None
    if plain_folder:
        load_config(plain_folder)
    with progress_bar() as progress:
        folder = engine_folder(engine, progress, kernels=device == "cuda")
    cases = _cases(folder, names, device, tree)
    choice = SpecChoice(
        engine=folder,
        plain=plain_folder or folder,
        shape=shape,
        threads=threads,
        prompts=prompts or (_VERIFIED_PROMPTS if verify else _PROMPTS),
        max_tokens=max_tokens,
        repeats=repeats or _REPEATS,
    )
    with closing(SpecSession.open(choice)) as session:
        if verify:
            return _verify(session, record, as_json=as_json)
        own = prefix_of(load_config(folder))
        figures: dict[str, Figures] = {
            _key(case.name, own, name): session.figures(case) for case in cases
        }
    publish(figures, lambda: _print(figures), as_json=as_json)
    record.keep(figures)
    missed = (name for name, found in figures.items() if not _is_good(found))
    return judged(f"{name}: misses its aim" for name in missed)


def _key(case: str, own: str, name: str) -> str:
    kind, _, rest = case.partition("/")
    return f"{name}/{rest}" if name and kind == own else case


def _verify(session: SpecSession, record: Record, *, as_json: bool) -> int:
    verified = session.verify()
    named = {f"verify/{name}": found for name, found in verified.items()}
    title = "Greedy replies beside those of plain decoding"
    publish(named, lambda: print_cases(title, _VERIFY_FIELDS, verified), as_json=as_json)
    record.keep(named)
    why = "a reply parts from plain decoding's where no near-tie is"
    return judged(f"{name}: {why}" for name, found in verified.items() if not found.ok)


def _shape(tree: str | None) -> EagleDraftingConfig | None:
    if tree is None:
        return None
    try:
        top_k, step, nodes = map(int, tree.split(","))
    except ValueError:
        raise click.BadParameter(f"{tree} is not K,T,N", param_hint="--tree") from None
    shape = EagleDraftingConfig(drafting_top_k=top_k, drafting_step=step, verify_tree_size=nodes)
    with wrong_usage():
        check_speculation(SpeculationOptions(eagle=shape))
    return shape


def _cases(
    folder: Path, names: Sequence[str], device: str | None, tree: str | None
) -> list[SpecCase]:
    config = load_config(folder)
    if device is not None and config.device != device:
        raise _other_device(config.device, device)
    if config.device == "cuda":
        gpu_facts()
    if tree and not config.enable_eagle_spec_decode:
        raise HearthError(
            "unsupported_option", "the engine has no draft: --tree is for one", "tree"
        )
    known = spec_cases(prefix_of(config))
    for name in set(names).difference(known):
        raise click.BadParameter(
            f"{name} is no case of this engine: {', '.join(known)}", param_hint="--case"
        )
    if names:
        return [known[name] for name in names]
    found = list(known.values())
    if not config.enable_eagle_spec_decode:
        note("the engine has no draft: its cases are left out")
        found = [case for case in found if case.kind != "eagle"]
    return [case for case in found if case.batch <= config.max_supported_batch_size]


def _other_device(has: str, wanted: str) -> HearthError:
    return HearthError("engine_incompatible", f"this engine is for {has}, not {wanted}", "device")


def _print(figures: Mapping[str, Figures]) -> None:
    rows = {name: found for name, found in figures.items() if isinstance(found, SpecFigures)}
    if rows:
        title = "Speculation; a speedup above 1 means that it is ahead"
        print_cases(title, _FIELDS, rows)
    for name, found in figures.items():
        if isinstance(found, MixedFigures):
            note(
                f"{name}: a mixed step takes {found.mixed_step_ms:.2f} ms, a round alone "
                f"{found.round_ms:.2f} ms, a vanilla step {found.vanilla_step_ms:.2f} ms: "
                f"{found.over_dearer:.3f} times the dearer"
            )


def _is_good(found: Figures) -> bool:
    if isinstance(found, MixedFigures):
        return found.over_dearer <= MOST_OVER_DEARER
    return found.speedup >= LEAST_SPEEDUP

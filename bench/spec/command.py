"""The command `hearth bench spec`."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import click

from bench.report import Record, note, print_cases, publish, record_option
from bench.spec.contest import LEAST_SPEEDUP, MOST_OVER_DEARER, MixedFigures, SpecFigures
from bench.spec.session import ALL_CASES, SpecCase, SpecChoice, SpecSession, prefix_of, spec_cases
from daemon.cli.console import progress_bar
from daemon.cli.errors import FAILED, wrong_usage
from daemon.cli.options import json_option
from daemon.gpu_facts import gpu_facts
from daemon.shipped import engine_folder
from runtime.config import load_config
from runtime.errors import HearthError
from runtime.options import EagleDraftingConfig, SpeculationOptions, check_speculation

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
    wrong = [name for name, found in figures.items() if not _is_good(found)]
    return _judge(wrong, "misses its aim")


def _key(case: str, own: str, name: str) -> str:
    kind, _, rest = case.partition("/")
    return f"{name}/{rest}" if name and kind == own else case


def _verify(session: SpecSession, record: Record, *, as_json: bool) -> int:
    verified = session.verify()
    named = {f"verify/{name}": found for name, found in verified.items()}
    title = "Greedy replies beside those of plain decoding"
    publish(named, lambda: print_cases(title, _VERIFY_FIELDS, verified), as_json=as_json)
    record.keep(named)
    wrong = [name for name, found in verified.items() if not found.ok]
    return _judge(wrong, "a reply parts from plain decoding's where no near-tie is")


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


def _judge(wrong: Sequence[str], why: str) -> int:
    for name in wrong:
        note(f"{name}: {why}")
    return FAILED if wrong else 0


def _is_good(found: Figures) -> bool:
    if isinstance(found, MixedFigures):
        return found.over_dearer <= MOST_OVER_DEARER
    return found.speedup >= LEAST_SPEEDUP

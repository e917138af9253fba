from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import click

from bench.record import keep_figures, record_option
from bench.report import figure, note, print_table, publish
from bench.spec import LEAST_SPEEDUP, SpecFigures
from bench.spec_cases import ALL_CASES, SpecCase, prefix_of, spec_cases
from bench.spec_mixed import MOST_OVER_DEARER, MixedFigures
from bench.spec_session import SpecChoice, SpecSession
from bench.spec_verify import VerifyFigures
from daemon.cli.console import progress_bar
from daemon.cli.errors import FAILED
from daemon.cli.options import json_option
from daemon.shipped import engine_folder
from runtime.config import load_config
from runtime.errors import HearthError
from runtime.options import EagleDraftingConfig

Figures = SpecFigures | MixedFigures
_COLUMNS = (
    "case",
    "accept length",
    "speedup",
    "with prefill",
    "vanilla tok/s",
    "tok/s",
    "rounds",
    "vanilla ms",
    "draft ms",
    "verify ms",
    "commit ms",
    "equal",
)
_VERIFY_COLUMNS = ("shape and batch", "prompts", "equal", "near-ties", "wrong", "gap", "length")
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
    record: Path | None,
    verify: bool,
    as_json: bool,
    threads: int,
    max_tokens: int,
    repeats: int | None,
) -> int:
    """Speculation against plain decoding on the held-out prompts of the shipped model.

    Both decode the same prompts greedily in this process and take turns. With --verify the
    replies of every tree shape, or that of --tree, and batch size are compared with plain
    decoding's. The exit code is 1 when a reply differs but for a near-tie, a case loses more than
    3%, or a mixed step costs more than 1.1 times the dearer kind.
    """
    if verify and (names or repeats):
        raise click.UsageError("--case and --repeats are for measuring, not for --verify")
    with progress_bar() as progress:
        folder = engine_folder(engine, progress)
    choice = SpecChoice(
        engine=folder,
        plain=engine_folder(plain) if plain else folder,
        shape=_shape(tree),
        threads=threads,
        prompts=prompts or (_VERIFIED_PROMPTS if verify else _PROMPTS),
        max_tokens=max_tokens,
        repeats=repeats or _REPEATS,
    )
    cases = _cases(folder, names, device, tree)
    with closing(SpecSession.open(choice)) as session:
        if verify:
            return _verify(session, record, as_json=as_json)
        figures: dict[str, Figures] = {case.name: session.figures(case) for case in cases}
    publish(figures, lambda: _print(figures), as_json=as_json)
    keep_figures(record, figures, "spec")
    return _judge(figures)


def _verify(session: SpecSession, record: Path | None, *, as_json: bool) -> int:
    verified = session.verify()
    named = {f"verify/{name}": found for name, found in verified.items()}
    publish(named, lambda: _print_verified(verified), as_json=as_json)
    keep_figures(record, named, "spec")
    return _judge_verified(verified)


def _shape(tree: str | None) -> EagleDraftingConfig | None:
    if tree is None:
        return None
    try:
        top_k, step, nodes = map(int, tree.split(","))
    except ValueError:
        raise click.BadParameter(f"{tree} is not K,T,N", param_hint="--tree") from None
    return EagleDraftingConfig(drafting_top_k=top_k, drafting_step=step, verify_tree_size=nodes)


def _cases(
    folder: Path, names: Sequence[str], device: str | None, tree: str | None
) -> list[SpecCase]:
    config = load_config(folder)
    if device is not None and config.device != device:
        raise HearthError(
            "engine_incompatible", f"this engine is for {config.device}, not {device}", "device"
        )
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


def _print(figures: Mapping[str, Figures]) -> None:
    rows = [_row(name, found) for name, found in figures.items() if isinstance(found, SpecFigures)]
    if rows:
        print_table("Speculation; a speedup above 1 means that it is ahead", _COLUMNS, rows)
    for name, found in figures.items():
        if isinstance(found, MixedFigures):
            note(
                f"{name}: a mixed step takes {found.mixed_step_ms:.2f} ms, a round alone "
                f"{found.round_ms:.2f} ms, a vanilla step {found.vanilla_step_ms:.2f} ms: "
                f"{found.over_dearer:.3f} times the dearer"
            )


def _row(name: str, found: SpecFigures) -> tuple[str, ...]:
    return (
        name,
        figure(found.accept_length),
        figure(found.speedup, ".3f"),
        figure(found.speedup_with_prefill, ".3f"),
        figure(found.vanilla_tokens_per_s, ".0f"),
        figure(found.tokens_per_s, ".0f"),
        figure(found.round_share),
        figure(found.vanilla_step_ms, ".3f"),
        figure(found.draft_ms, ".3f"),
        figure(found.verify_ms, ".3f"),
        figure(found.commit_ms, ".3f"),
        f"{found.equal_replies:.1%}",
    )


def _print_verified(verified: Mapping[str, VerifyFigures]) -> None:
    rows = [
        (
            name,
            str(found.prompts),
            str(found.equal),
            str(len(found.near_ties)),
            str(len(found.failures)),
            figure(max((one.gap for one in found.near_ties), default=None), ".1e"),
            figure(found.accept_length),
        )
        for name, found in verified.items()
    ]
    print_table("Greedy replies beside those of plain decoding", _VERIFY_COLUMNS, rows)


def _judge_verified(verified: Mapping[str, VerifyFigures]) -> int:
    wrong = [name for name, found in verified.items() if not found.ok]
    for name in wrong:
        note(f"{name}: a reply parts from plain decoding's where no near-tie is")
    return FAILED if wrong else 0


def _judge(figures: Mapping[str, Figures]) -> int:
    wrong = [name for name, found in figures.items() if not _is_good(found)]
    for name in wrong:
        note(f"{name} misses its aim")
    return FAILED if wrong else 0


def _is_good(found: Figures) -> bool:
    if isinstance(found, MixedFigures):
        return found.over_dearer <= MOST_OVER_DEARER
    return found.speedup >= LEAST_SPEEDUP

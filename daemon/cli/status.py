"""Commands that ask a running daemon once: its status, its metrics, a reload."""

import click
import msgspec

from hearth.daemon.cli.clients import connected, daemon_address
from hearth.daemon.cli.console import out, size, table
from hearth.daemon.cli.options import json_option, key_option, socket_option
from hearth.daemon.control.client import ask
from hearth.daemon.control.messages import Metrics, MetricsText, Reload, Reloaded
from hearth.daemon.service_state import words
from hearth_client.protocol import (
    ExecutorReport,
    ImagesReport,
    PrefixReport,
    SpeculationReport,
    StageReport,
    StatusReport,
)

Row = tuple[str, str]


def executor_rows(report: ExecutorReport) -> list[Row]:
    """Names and values of each stage, and of prefix cache and speculation where there are some."""
    rows = [("prefill", _stage(report.prefill)), ("generation", _stage(report.generation))]
    if report.switches:
        rows.append(("adapter", f"{report.adapter or 'none'}, {report.switches} switches"))
    if report.images is not None:
        rows.append(("images", _images(report.images)))
    if report.prefix is not None:
        rows.append(("prefix cache", _prefix(report.prefix)))
    if report.speculation is not None:
        rows += _speculation(report.speculation)
    return rows


def _stage(stage: StageReport) -> str:
    speed = f", {stage.tokens / stage.seconds:.0f} tokens/s" if stage.seconds else ""
    return f"{stage.tokens} tokens in {stage.steps} steps, {stage.seconds:.1f} s{speed}"


def _images(report: ImagesReport) -> str:
    merged = f"{report.images} as {report.tokens} tokens, merged in {report.merge_seconds:.1f} s"
    encoded = f", {report.encoded} encoded in {report.encode_seconds:.1f} s"
    return merged + (encoded if report.encoded else "")


def _prefix(report: PrefixReport) -> str:
    share = f" ({report.reused / report.queried:.0%})" if report.queried else ""
    held = "".join(f", {tier} {size(count)}" for tier, count in report.bytes.items() if count)
    return f"{report.reused} of {report.queried} tokens reused{share}{held}"


def _speculation(report: SpeculationReport) -> list[Row]:
    given = f"{report.accepted} tokens in {report.rounds} rounds, {report.drafted} drafted"
    shares = (f"{count / report.rounds:.0%}" for count in report.accepted_by_position)
    times = (report.draft_s, report.verify_s, report.commit_s)
    return [
        ("speculation", f"{given}, accept length {report.accept_length:.2f}"),
        ("accepted by position", " ".join(shares)),
        ("speculation time", "draft {:.1f} s, verify {:.1f} s, commit {:.1f} s".format(*times)),
    ]


@click.command()
@socket_option
@key_option
@json_option
def status(socket: str | None, key: str | None, *, as_json: bool) -> None:
    """Show what the running daemon serves and does."""
    with connected(socket, key, name="hearth-status", status_only=True) as client:
        report = client.status()
    if as_json:
        fields = msgspec.to_builtins(report)
        click.echo(msgspec.json.encode({k: v for k, v in fields.items() if k not in {"t", "id"}}))
    else:
        out().print(table(_rows(report)))


def _rows(report: StatusReport) -> list[tuple[str, str]]:
    rows = [
        ("server", report.server),
        ("state", words(report.state, report.stage, report.share, report.reason)),
        ("model", report.model),
        ("up", f"{report.uptime_s:.0f} s"),
        ("clients", str(report.clients)),
        ("places", f"{report.running} of {report.places} used"),
        ("requests", f"{report.running} running, {report.queued} queued"),
        ("queued tokens", str(report.queued_tokens)),
    ]
    rows += [("adapters", ", ".join(report.adapters))] if report.adapters else []
    rows += executor_rows(report.executor) if report.executor is not None else []
    rows += [(f"engine {name}", str(value)) for name, value in report.engine.items()]
    rows += [(f"total {name}", str(value)) for name, value in report.totals.items()]
    return rows


_ANSWER_S = 10.0


@click.command()
@socket_option
@click.option("--openmetrics", is_flag=True, help="In that form instead of Prometheus's own.")
def metrics(socket: str | None, *, openmetrics: bool) -> None:
    """Print what the running daemon counts, as Prometheus would read it.

    It needs the daemon's user or root; docs/metrics.md says what each metric means.
    """
    answer = ask(Metrics(openmetrics), MetricsText, daemon_address(socket), timeout_s=_ANSWER_S)
    click.echo(answer.text, nl=False)


@click.command()
@socket_option
@json_option
def reload(socket: str | None, *, as_json: bool) -> None:
    """Let the running daemon read its settings again, and say what became of them.

    It needs the daemon's user or root. Where the settings are wrong nothing changes.
    """
    answer = ask(Reload(), Reloaded, daemon_address(socket))
    if as_json:
        click.echo(msgspec.json.encode(answer))
        return
    if answer.changed:
        click.echo(f"reloaded: {', '.join(answer.changed)}")
    if answer.needs_restart:
        click.echo(f"takes effect at a restart: {', '.join(answer.needs_restart)}")
    if not answer.changed and not answer.needs_restart:
        click.echo(
            "nothing has changed: a reload reads the settings file, flags and variables stay"
        )

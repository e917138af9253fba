import os
import sys
from pathlib import Path

import click
import pytest

from hearth.bench.clients import command
from hearth.bench.clients.command import case_table, measure_clients, run_program
from hearth.bench.clients.measure import ClientFigures
from hearth.bench.clients.scripted_daemon import answers
from hearth.bench.report import print_cases
from hearth.runtime.errors import HearthError
from hearth_client.protocol import Accepted, Delta, Done, Generate, Tokenize
from tests.bench.running import invoke, run
from tests.clients.vectors import CLIENTS

FIGURES = '{"status_us": 120, "delta_us": 4.5, "image_ms": 1.25, "rss_kb": -3}'


def test_the_python_client_alone_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", {}.get)
    code, figures = run("clients", "--client", "python", "--rounds", "1")
    assert not code
    assert figures.keys() == {"python", "python_asyncio", "grpc", "http"}
    assert (figures.pop("grpc"), figures.pop("http")) == (None, None)
    for one in figures.values():
        assert min(one["status_us"], one["delta_us"], one["image_ms"]) > 0


def test_grpc_does_the_same() -> None:
    pytest.importorskip("grpc")
    figures = measure_clients({}, rounds=1)
    assert figures.keys() == {"grpc", "grpc_asyncio", "http"}
    for one in (figures["grpc"], figures["grpc_asyncio"]):
        assert one
        assert min(one.status_us, one.delta_us, one.image_ms) > 0


def test_a_ratio_is_to_grpc_in_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    def costs(delta_us: float) -> ClientFigures:
        return ClientFigures(status_us=1, delta_us=delta_us, image_ms=1, rss_kb=1)

    deltas = {"go": 4, "rust_asyncio": 4, "grpc": 8, "grpc_asyncio": 16}
    figures = {name: costs(delta) for name, delta in deltas.items()}
    print_cases(*case_table({**figures, "java": None}))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    found = [(row[0], float(row[-1])) for row in rows]
    assert found == [("go", 0.5), ("rust_asyncio", 0.25), ("grpc", 1), ("grpc_asyncio", 1)]


def test_a_reply_has_a_delta_for_each_token() -> None:
    accepted, *deltas, done = answers(Generate(id="a", prompt="x", max_tokens=3))
    assert isinstance(accepted, Accepted)
    assert isinstance(done, Done)
    told = [(one.seq, len(one.tokens)) for one in deltas if isinstance(one, Delta)]
    assert told == [(0, 1), (1, 1), (2, 1)]
    with pytest.raises(HearthError, match="no answer to Tokenize"):
        list(answers(Tokenize(id="a", text="x")))


def test_each_client_that_has_a_driver_has_a_bench() -> None:
    drivers, benches = (
        {one.parent.name for one in CLIENTS.glob(f"*/{program}") if os.access(one, os.X_OK)}
        for program in ("driver", "bench")
    )
    assert drivers == benches
    assert "go" in drivers


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_a_program_prints_its_figures_in_one_line() -> None:
    told = run_program("go", program(f"print('{FIGURES}')"))
    assert told == ClientFigures(status_us=120, delta_us=4.5, image_ms=1.25, rss_kb=-3)


def test_a_client_that_was_not_built_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = "import sys; print('run clients/go/check', file=sys.stderr); sys.exit(77)"
    assert run_program("go", program(words)) is None
    assert capsys.readouterr().err == "go is skipped: run clients/go/check\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import sys; sys.exit('no daemon')", "ended with 1: no daemon"),
        ("print()", "printed no figures"),
        ("print('{\"status_us\": 1}')", "printed no figures: .*delta_us"),
        (f"print('{FIGURES}'.replace('120', 'null'))", "printed no figures: .*status_us"),
        ("import time; time.sleep(600)", "did not end in time"),
    ],
)
def test_a_program_that_breaks_the_contract_is_told(
    text: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_TIMEOUT_S", 0.5 if "sleep" in text else 20)
    with pytest.raises(HearthError, match=f"the bench of go {words}"):
        run_program("go", program(text))


@pytest.mark.parametrize(
    ("flags", "words"),
    [(("--client", "cobol"), "no client has the name cobol: .*python"), ((), "has no clients")],
)
def test_what_is_not_there_is_wrong_usage(
    flags: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    folder = () if flags else ("--clients", str(tmp_path))
    with pytest.raises(click.UsageError, match=words):
        invoke("clients", *flags, *folder)

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hearth.daemon.check import inspect_engine, with_answer
from hearth.daemon.cli.export import export
from hearth.daemon.cli.generate import generate
from hearth.daemon.cli.weights import weights
from hearth.daemon.configuration.settings import settings_of
from hearth.runtime.errors import HearthError
from tests.daemon.conftest import REFERENCE
from tests.runtime.weights.external_models import needs_other_weights


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

"""A whole daemon that is given other weights while it serves."""

from pathlib import Path

import pytest
from hearth_client import Client

from daemon.control.client import ask
from daemon.control.messages import Reload, Reloaded
from daemon.own_daemon import own_daemon
from runtime.errors import HearthError
from runtime.export import ExportOptions, export_model
from runtime.export.weights_export import export_weights
from tests.daemon.conftest import REFERENCE
from tests.runtime.weights.external_models import needs_other_weights, tuned


@needs_other_weights
@pytest.mark.slow
def test_a_fine_tune_is_served_in_mid_service(tmp_path: Path, short_folder: Path) -> None:
    engine, weights, config = (short_folder / name for name in ("engine", "weights", "hearth.toml"))
    options = ExportOptions(capacity=96, max_batch=2, external_weights=True)
    export_model(REFERENCE, engine, options)
    export_weights(tuned(REFERENCE, tmp_path / "other"), engine, weights)
    config.write_text("")
    flags = ["--config", str(config), "--threads", "1", "--speculation", "off"]
    with own_daemon(engine, flags) as daemon, Client(daemon.socket) as client:

        def served() -> str:
            return client.generate("a fine", max_tokens=8, ignore_eos=True).text()

        def reloaded(weights: Path) -> Reloaded:
            config.write_text(f'weights = "{weights}"\n')
            return ask(Reload(), Reloaded, str(daemon.socket))

        first = served()
        assert client.status().engine["weights"] == REFERENCE.name
        assert reloaded(weights) == Reloaded(["weights"], [])
        other = served()
        assert other != first
        assert client.status().engine["weights"] == "other"
        # A file that does not fit, or was damaged, changes nothing.
        damaged = bytearray(weights.read_bytes())
        damaged[-1] ^= 1
        (short_folder / "damaged").write_bytes(damaged)
        for name in ("engine/weights.json", "damaged"):
            with pytest.raises(HearthError) as caught:
                reloaded(short_folder / name)
            assert caught.value.code == "weights_invalid"
        assert served() == other

from pathlib import Path

import pytest

from daemon.cli import serve as module
from daemon.cli.serve import serve
from runtime.errors import HearthError


def test_an_impossible_socket_is_refused_before_an_engine_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "engine_folder", lambda *_unused: pytest.fail("built an engine"))
    with pytest.raises(HearthError, match="at most 107"):
        serve.main(["--socket", str(tmp_path / ("x" * 110))], standalone_mode=False)

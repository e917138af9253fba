from __future__ import annotations

import sys

import pytest

from hearth.daemon.exit_codes import CONFIGURATION, exit_code
from hearth.daemon.observe.tracing.otlp import open_spans
from hearth.runtime.errors import HearthError


def test_without_the_extra_the_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(
        HearthError, match=r"pip install 'opentelemetry-exporter-otlp-proto-http>="
    ) as caught:
        open_spans("home")
    assert caught.value.field == "traces"
    assert exit_code(caught.value) == CONFIGURATION


def test_a_variable_that_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "5000")
    with pytest.raises(HearthError) as caught:
        open_spans("home")
    assert (caught.value.code, caught.value.field) == ("invalid_value", "traces")

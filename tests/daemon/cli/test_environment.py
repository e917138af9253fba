from hearth.daemon.cli.errors import keep_to_this_machine


def test_onnx_runtime_is_told_to_report_nothing() -> None:
    environ = {"HOME": "/home/one"}
    keep_to_this_machine(environ)
    assert environ == {"HOME": "/home/one", "ORT_DISABLE_TELEMETRY": "1"}


def test_what_the_operator_has_decided_stays() -> None:
    environ = {"ORT_DISABLE_TELEMETRY": "0"}
    keep_to_this_machine(environ)
    assert environ == {"ORT_DISABLE_TELEMETRY": "0"}

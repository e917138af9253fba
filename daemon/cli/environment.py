"""What libraries read from the environment while they are loaded."""

from collections.abc import MutableMapping


def keep_to_this_machine(environ: MutableMapping[str, str]) -> None:
    """Have ONNX Runtime report nothing about this machine, unless the operator decided otherwise.

    Its official builds keep an identifier in the user's cache folder and send events to their
    maker. They read the variable once, when they are loaded; other processes inherit it.
    """
    environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

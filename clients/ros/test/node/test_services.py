import json
from typing import Any

from hearth_msgs.msg import Turn


def test_tokens_of_text_and_of_a_conversation(ros: Any, node: str) -> None:
    plain = ros.call(node, "tokenize", text="Turn on the lamp")
    back = ros.call(node, "detokenize", tokens=plain.tokens)
    assert (back.text, back.error_code) == ("Turn on the lamp", "")
    turn = Turn(role="user", content="Turn on the lamp")
    whole = ros.call(node, "tokenize", messages=[turn])
    assert len(whole.tokens) > len(plain.tokens) > 0
    wrong = ros.call(node, "detokenize", tokens=[-1])
    assert (wrong.error_code, wrong.text) == ("invalid_value", "")


def test_metadata_adapters_and_health(ros: Any, node: str) -> None:
    metadata = ros.call(node, "metadata")
    assert (metadata.model, metadata.error_code) == ("home", "")
    assert "tools" in metadata.features
    assert json.loads(metadata.limits)["total_tokens"] > 0
    adapters = ros.call(node, "adapters")
    assert (list(adapters.adapters), adapters.error_code) == ([], "")
    health = ros.call(node, "health")
    assert (health.success, health.message) == (True, "home is ready")


def test_diagnostics(ros: Any, node: str) -> None:
    (status,) = ros.diagnostics().get(timeout=30).status
    level = status.level[0] if isinstance(status.level, bytes) else status.level
    assert (level, status.message, status.name) == (0, "home is ready", f"{node}: daemon")
    assert {one.key: one.value for one in status.values}["state"] == "ready"

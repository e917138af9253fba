import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import Process

from hearth_msgs.msg import Turn

FOLDER = Path(__file__).parents[2]
VERSION = os.environ["ROS_VERSION"]


def test_the_program_of_the_page(ros: Any, node: str, tmp_path: Path) -> None:
    page = (FOLDER / f"ros{VERSION}" / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert f'"/{node}/generate"' in program
    (tmp_path / "asker.py").write_text(program)
    command = [sys.executable, str(tmp_path / "asker.py")]
    with Process(command, tmp_path / "log", dict(os.environ)) as process:
        process.wait()
    reply, reason = process.log().splitlines()[-2:]
    assert (json.loads(reply)["action"], reason) == ("turn_on", "stop")
    assert ros.version == int(VERSION)


@pytest.mark.skipif(VERSION == "2", reason="there are no wheels of ROS 2's launch")
def test_roslaunch_starts_the_node_with_its_topics(
    ros: Any, home: Any, frames: dict[str, list[bytes]], tmp_path: Path
) -> None:
    (tmp_path / "hearth.yaml").write_text("diagnostics_period_s: 0.2\nmax_tokens: 3\n")
    command = ["/usr/bin/roslaunch", "hearth_ros1", "hearth.launch", f"address:={home.socket}"]
    command += [f"params_file:={tmp_path}/hearth.yaml", "image:=/camera/image"]
    environ = {**os.environ, "ROS_NAMESPACE": "launched"}
    with Process(command, tmp_path / "log", environ) as process:
        turn = Turn(role="user", content="Tell me a story")
        _, result = ros.send("launched/hearth", ros.goal_type(messages=[turn])).end()
        assert result.completion_tokens > 3, "a goal has its own options"
        ros.publish("/camera/image", frames["/camera/image"][0], "Image")
        response = ros.listen("/launched/hearth/error")
        diagnostics = ros.diagnostics()
        values: dict[str, str] = {}
        while values.get("pictures taken") != "1":
            (status,) = diagnostics.get(timeout=30).status
            if status.name == "launched/hearth: daemon":
                values = {one.key: one.value for one in status.values}
        ros.publish("/launched/hearth/prompt", "What is this?")
        # The picture was taken from the camera's topic, and this model sees nothing.
        assert response.get(timeout=30).data.startswith("unsupported_option: ")
        process.terminate()
        assert process.wait() == 0, process.log()

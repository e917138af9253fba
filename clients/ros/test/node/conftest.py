import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Picture
from rosbags.typesys import get_typestore

sys.path.insert(0, str(Path(__file__).parent))
from processes import Daemon

SCENE = Path(__file__).parents[4] / "daemon" / "demo" / "scene.jpg"
STAMP_S = 1_700_000_000


@pytest.fixture(scope="session")
def ros_module() -> Any:
    """The harness of the ROS that this environment has."""
    return importlib.import_module(f"ros{os.environ['ROS_VERSION']}")


@pytest.fixture(scope="session")
def ros(ros_module: Any) -> Iterator[Any]:
    with tempfile.TemporaryDirectory(prefix="hearth-ros-") as folder:
        running = ros_module.Ros(Path(folder))
        yield running
        running.close()


@pytest.fixture(scope="session")
def start_daemon() -> Iterator[Callable[..., Daemon]]:
    started: list[Daemon] = []
    with tempfile.TemporaryDirectory(prefix="hearth-") as folder:

        def start(model: str, name: str = "") -> Daemon:
            place = Path(folder) / (name or model)
            place.mkdir(exist_ok=True)
            started.append(Daemon(model, place))
            return started[-1]

        yield start
        for daemon in started:
            daemon.stop()


@pytest.fixture(scope="session")
def home(start_daemon: Callable[..., Daemon]) -> Daemon:
    return start_daemon("home")


@pytest.fixture(scope="session")
def seeing(start_daemon: Callable[..., Daemon]) -> Daemon:
    return start_daemon("home-vision")


@pytest.fixture(scope="session")
def node(ros: Any, home: Daemon) -> Iterator[str]:
    """Name of a node with nothing but an address, for all who leave it as it is."""
    parameters = {"address": str(home.socket), "tool_timeout_s": 5.0, "diagnostics_period_s": 0.2}
    with ros.hearth("hearth", **parameters):
        yield "hearth"


@pytest.fixture(scope="session")
def frames(ros_module: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[bytes]]:
    """Messages by topic, read from a bag with a camera's pictures of a scene: a black one first.

    Rows of the raw picture have bytes between them.
    """
    types = get_typestore(ros_module.STORE).types
    ros1 = ros_module.Ros.version == 1
    stamp = (STAMP_S, 0)
    header = types["std_msgs/msg/Header"](
        **({"seq": 0} if ros1 else {}),
        stamp=types["builtin_interfaces/msg/Time"](*stamp),
        frame_id="camera",
    )
    with Picture.open(SCENE) as scene:
        pixels = np.asarray(scene.convert("RGB"))
    height, width, _ = pixels.shape
    padded = np.pad(pixels.reshape(height, 3 * width), ((0, 0), (0, 5)))
    black = BytesIO()
    Picture.new("RGB", (64, 64)).save(black, "JPEG")
    raw = types["sensor_msgs/msg/Image"]
    file = types["sensor_msgs/msg/CompressedImage"]

    def compressed(data: bytes) -> Any:
        return file(header=header, format="jpeg", data=np.frombuffer(data, np.uint8))

    shown = {
        "/camera/image": [
            raw(header, height, width, "rgb8", 0, padded.shape[1], rows.ravel())
            for rows in (np.zeros_like(padded), padded)
        ],
        "/camera/image/compressed": [compressed(black.getvalue()), compressed(SCENE.read_bytes())],
    }
    path = tmp_path_factory.mktemp("bag") / "camera.bag"
    write(ros_module, path, shown)
    found: dict[str, list[bytes]] = {topic: [] for topic in shown}
    with ros_module.read_bag(path) as bag:
        for connection, _, data in bag.messages():
            found[connection.topic].append(bytes(data))
    assert {topic: len(messages) for topic, messages in found.items()} == dict.fromkeys(shown, 2)
    return found


def write(ros_module: Any, path: Path, shown: dict[str, list[Any]]) -> None:
    store = get_typestore(ros_module.STORE)
    serialize = store.serialize_ros1 if ros_module.Ros.version == 1 else store.serialize_cdr
    with ros_module.write_bag(path) as bag:
        for topic, messages in shown.items():
            kind = type(messages[0]).__msgtype__
            connection = bag.add_connection(topic, kind, typestore=store)
            for index, message in enumerate(messages):
                bag.write(connection, (STAMP_S + index) * 10**9, serialize(message, kind))

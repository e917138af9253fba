"""A daemon whose model sees, and what becomes of its requests where a process of it dies."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image as Pillow

from hearth.daemon.cli.generate import generate
from hearth.daemon.own_daemon import OwnDaemon, own_daemon
from hearth.runtime.export import ExportOptions, export_model
from hearth_client import (
    Client,
    DeadlineExceeded,
    EncoderFailed,
    Generation,
    Image,
    ImageInvalid,
    ImageUsage,
)
from tests.daemon.door.harness import until
from tests.vision_models import write_vision_model

pytestmark = pytest.mark.slow
PICTURE_TOKENS = 24
# In pixels, as the tower has them.
SEEN = (96, 64)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    model = write_vision_model(folder / "model", "qwen3_vl")
    export_model(model, folder / "engine", ExportOptions(max_batch=2, capacity=256))
    return folder / "engine"


@pytest.fixture(scope="module")
def daemon(engine: Path) -> Iterator[OwnDaemon]:
    with own_daemon(engine) as made:
        yield made


@pytest.fixture
def client(daemon: OwnDaemon) -> Iterator[Client]:
    with Client(daemon.socket, timeout=60) as made:
        yield made


def picture(seed: int, kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, kind)
    return file.getvalue()


def ask(client: Client, *content: str | Image, deadline_s: float | None = None) -> Generation:
    turn = {"role": "user", "content": list(content)}
    return client.generate(messages=[turn], max_tokens=4, ignore_eos=True, deadline_s=deadline_s)


def seen(client: Client, *content: str | Image) -> tuple[list[int], ImageUsage | None]:
    generation = ask(client, *content)
    tokens = [token for delta in generation for token in delta.tokens]
    assert generation.done is not None
    return tokens, generation.done.images


@pytest.fixture
def frozen(daemon: OwnDaemon) -> Iterator[int]:
    """The encoder's process, which stands still until the end of the test, or dies before."""
    until(lambda: daemon.encoder, 60)
    encoder = daemon.encoder
    assert encoder is not None
    os.kill(encoder, signal.SIGSTOP)
    yield encoder
    if daemon.encoder == encoder:
        os.kill(encoder, signal.SIGCONT)


def test_a_picture_is_seen_and_kept_for_when_it_comes_again(client: Client) -> None:
    first, usage = seen(client, "look: ", Image(picture(1)), "?")
    assert usage is not None
    assert (usage.count, usage.cached) == (1, 0)
    assert usage.decode_ms > 0
    again, usage = seen(client, "look: ", Image(picture(1)), "?")
    assert usage is not None
    assert (usage.cached, usage.engine_ms) == (1, 0)
    assert again == first
    both, usage = seen(client, Image(picture(1)), "and", Image(picture(2, "JPEG")))
    assert usage is not None
    assert (usage.count, usage.cached, usage.tokens) == (2, 1, 48)
    assert usage.sizes == [SEEN] * 2
    assert len(both) == 4


def test_several_replies_about_a_picture_take_one_encoding(client: Client) -> None:
    turn = {"role": "user", "content": ["tell: ", Image(picture(3)), "?"]}
    draw = partial(client.generate, messages=[turn], max_tokens=4, ignore_eos=True, temperature=1.5)
    generation = draw(n=3, seed=5)
    ids: list[list[int]] = [[], [], []]
    for delta in generation:
        ids[delta.choice] += delta.tokens
    done = generation.done
    assert done is not None
    assert [(one.reason, one.completion_tokens) for one in done.choices] == [("length", 4)] * 3
    assert done.usage.completion_tokens == 12
    assert done.images is not None
    assert (done.images.count, done.images.cached, done.images.tokens) == (1, 0, PICTURE_TOKENS)
    for place, tokens in enumerate(ids):
        alone = draw(seed=5 + place)
        assert [token for delta in alone for token in delta.tokens] == tokens
        assert alone.done is not None
        assert alone.done.usage.prompt_tokens == done.usage.prompt_tokens


def test_a_prompt_is_known_as_far_as_its_pictures_are_the_same(client: Client) -> None:
    known, replies = [], []
    for seed in (11, 11, 12, 11):
        generation = ask(client, "look well: ", Image(picture(seed)), "?")
        replies.append(generation.text())
        assert generation.done is not None
        usage = generation.done.usage
        known.append(usage.cached_tokens)
    behind = usage.prompt_tokens - known[2]
    assert known[1] == known[3] == usage.prompt_tokens - 1
    # The picture's own tokens, and what follows it.
    assert behind > PICTURE_TOKENS
    assert replies[0] == replies[1] == replies[3]


def test_a_daemon_says_what_one_process_alone_says(
    engine: Path, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(picture(7))
    asked = [str(engine), "--chat", "--json", "--max-tokens", "4", "--ignore-eos"]
    asked += ["--image", str(path), "--prompt", "What is it?"]
    told = CliRunner().invoke(generate, asked, standalone_mode=False).stdout
    assert seen(client, Image(path), "What is it?")[0] == json.loads(told)["token_ids"]


def test_a_broken_picture_fails_alone_and_is_named(client: Client) -> None:
    with pytest.raises(ImageInvalid) as caught:
        seen(client, "a", Image(picture(3)[:1000]))
    assert caught.value.field == "messages[0].content[1]"
    assert seen(client, "a", Image(picture(3)))[0]


def test_files_are_decoded_apart_within_bounds_and_give_way_to_text(
    daemon: OwnDaemon, client: Client
) -> None:
    assert seen(client, Image(picture(20)))[0]
    assert daemon.encoder is not None
    (decoder,) = children(daemon.encoder)
    for process in (daemon.encoder, decoder):
        niceness = os.getpriority(os.PRIO_PROCESS, process)
        assert niceness == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    proc = Path(f"/proc/{decoder}")
    limits = (proc / "limits").read_text().splitlines()
    (addresses,) = [line.split() for line in limits if line.startswith("Max address space")]
    assert int(addresses[3]) < 3 << 30
    maps = (proc / "maps").read_text()
    assert not [library for library in ("onnxruntime", "libcuda", "libzmq") if library in maps]
    os.kill(decoder, signal.SIGKILL)
    assert seen(client, Image(picture(21)))[0]
    assert children(daemon.encoder) != [decoder]


def children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def test_text_goes_on_while_the_encoder_stands_still(client: Client, frozen: int) -> None:
    waits = ask(client, Image(picture(4)))
    late = ask(client, Image(picture(5)), deadline_s=0.2)
    assert seen(client, "text alone")[1] is None
    with pytest.raises(DeadlineExceeded):
        late.text()
    client.cancel(waits)
    assert waits.text() == ""
    assert waits.done is not None
    assert waits.done.reason == "cancelled"
    assert client.status().queued == 0
    os.kill(frozen, signal.SIGCONT)
    assert seen(client, Image(picture(4)))[0]


def test_a_crash_of_the_encoder_ends_its_requests_and_not_the_daemon(
    daemon: OwnDaemon, client: Client, frozen: int
) -> None:
    kept, _ = seen(client, Image(picture(1)))
    lost = ask(client, Image(picture(6)))
    until(lambda: client.status().queued == 1, 60)
    os.kill(frozen, signal.SIGKILL)
    with pytest.raises(EncoderFailed) as caught:
        lost.text()
    assert caught.value.field == "messages[0].content[0]"
    assert client.status().state == "ready"
    # What is there already needs no encoder, and what is not waits for the next one.
    assert seen(client, Image(picture(1)))[0] == kept
    assert seen(client, Image(picture(6)))[0]
    assert daemon.encoder != frozen


def test_embeddings_outlive_an_executor(daemon: OwnDaemon, client: Client) -> None:
    kept, _ = seen(client, Image(picture(1)))
    executor = daemon.executor
    assert executor is not None
    os.kill(executor, signal.SIGKILL)
    again, usage = seen(client, Image(picture(1)))
    assert again == kept
    assert usage is not None
    assert usage.cached == 1

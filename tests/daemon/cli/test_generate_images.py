"""`hearth generate --image`: pictures, a tower and text in one process."""

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from PIL import Image, ImageDraw

from hearth.daemon.cli.generate import generate
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from tests.vision_models import FAMILIES, write_vision_model


@pytest.fixture(scope="module", params=FAMILIES)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    options = ExportOptions(max_batch=2, capacity=512)
    export_model(write_vision_model(folder / "model", request.param), folder / "engine", options)
    return folder / "engine"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pictures")
    paths = []
    for number, colour in enumerate(("red", "blue")):
        image = Image.new("RGB", (96, 64), "white")
        ImageDraw.Draw(image).ellipse((8, 8, 56, 56), colour)
        paths.append(folder / f"{number}.{('png', 'jpg')[number]}")
        image.save(paths[-1])
    return [str(path) for path in paths]


def answers(engine: Path, *arguments: str) -> list[dict[str, Any]]:
    asked = [str(engine), "--chat", "--max-tokens", "4", "--ignore-eos", "--json", *arguments]
    result = CliRunner().invoke(generate, asked, standalone_mode=False)
    if result.exception:
        raise result.exception
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_what_is_seen_changes_what_is_said(seeing: Path, pictures: list[str]) -> None:
    red, blue = pictures
    prompts = ["--prompt", "What is it?", "--prompt", "Where?"]
    seen = [
        answers(seeing, *prompts, *images)
        for images in (
            ("--image", red),
            ("--image", red),
            ("--image", blue),
            ("--image", red, "--image", blue, "--system", "Look."),
        )
    ]
    assert [list(one) for one in seen[0]] == [
        ["token_ids", "text", "logprobs", "finish_reason"]
    ] * 2
    assert seen[0] == seen[1]
    logprobs = [one[0]["logprobs"][0] for one in seen]
    assert len(set(logprobs)) == 3


def test_a_file_that_is_no_picture_is_named(seeing: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(HearthError, match=r"broken\.png") as caught:
        answers(seeing, "--prompt", "x", "--image", str(broken))
    assert (caught.value.code, caught.value.field) == ("image_invalid", "image")


def test_a_model_that_sees_nothing_says_so(tiny_engine: Path, pictures: list[str]) -> None:
    with pytest.raises(HearthError) as caught:
        answers(tiny_engine, "--prompt", "x", "--image", pictures[0])
    assert (caught.value.code, caught.value.field) == ("unsupported_option", "image")


def test_images_need_a_template(tiny_engine: Path, pictures: list[str]) -> None:
    asked = [str(tiny_engine), "--prompt", "x", "--image", pictures[0]]
    result = CliRunner().invoke(generate, asked, standalone_mode=False)
    assert isinstance(result.exception, click.UsageError)

"""Pictures as data, by both APIs, to the shipped model that sees."""

from base64 import b64encode
from typing import Any

import httpx
import ollama
import pytest

from hearth.daemon.demo.show import PICTURE
from hearth.daemon.own_daemon import own_daemon
from hearth.daemon.shipped import vision_engine_folder
from hearth_client import Client, Image
from tests.clients.http.conftest import openai_client, serving

WORDS = "What is on the table?"


def shown(url: str) -> Any:
    picture = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [picture, {"type": "text", "text": WORDS}]}]


def test_a_picture_is_seen_as_by_the_own_client() -> None:
    data = b64encode(PICTURE.read_bytes()).decode()
    with own_daemon(vision_engine_folder()) as daemon, serving(daemon.socket) as url:
        with Client(daemon.socket) as client:
            turn = {"role": "user", "content": [Image(PICTURE), WORDS]}
            own = client.generate(messages=[turn], max_tokens=24).text()
        with openai_client(url) as other:
            asked = shown(f"data:image/jpeg;base64,{data}")
            answer = other.chat.completions.create(model="home-vision", messages=asked)
        turns = [{"role": "user", "content": WORDS, "images": [data]}]
        with ollama.Client(url) as third:
            said = third.chat("home-vision", turns).message.content
            assert "vision" in (third.show("home-vision").capabilities or [])
        assert answer.choices[0].message.content == said == own


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("http://localhost/a.png", "invalid_value"),
        ("file:///etc/passwd", "invalid_value"),
        ("data:image/png;base64,!", "invalid_value"),
        ("data:image/png;base64,AAAA", "image_invalid"),
    ],
)
def test_what_is_no_picture(door: str, url: str, code: str) -> None:
    answer = httpx.post(f"{door}/v1/chat/completions", json={"messages": shown(url)})
    told = answer.json()["error"]
    assert (told["code"], told["param"]) == (code, "messages[0].content[0].image_url.url")

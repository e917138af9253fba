from base64 import b64encode

import ollama

from hearth.daemon.demo.show import PICTURE
from hearth.daemon.own_daemon import own_daemon
from hearth.daemon.shipped import vision_engine_folder
from hearth_client import Client, Image
from tests.clients.http.conftest import openai_client, serving
from tests.clients.http.test_chat import shown


def test_a_picture_is_seen_as_by_the_own_client() -> None:
    data = b64encode(PICTURE.read_bytes()).decode()
    with own_daemon(vision_engine_folder()) as daemon, serving(daemon.socket) as url:
        with Client(daemon.socket) as client:
            turn = {"role": "user", "content": [Image(PICTURE), "What is this?"]}
            own = client.generate(messages=[turn], max_tokens=24).text()
        with openai_client(url) as other:
            asked = shown(f"data:image/jpeg;base64,{data}")
            answer = other.chat.completions.create(model="home-vision", messages=asked)
        turns = [{"role": "user", "content": "What is this?", "images": [data]}]
        with ollama.Client(url) as third:
            said = third.chat("home-vision", turns).message.content
            assert "vision" in (third.show("home-vision").capabilities or [])
        assert answer.choices[0].message.content == said == own

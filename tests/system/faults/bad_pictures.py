"""Rows about pictures that are wrong, and about messages that do not fit their pictures."""

import struct
import time
import zlib
from collections.abc import Sequence
from io import BytesIO
from typing import Any, NamedTuple

from PIL import Image

from hearth.bench.child_process import family_usage
from hearth.bench.vision.session import SIZES, photograph
from tests.system.faults.trial import NotRunError, Trial, seconds_since
from tests.system.faults.vision_faults import PROMPT, QUESTION
from tests.system.faults.wire_client import WireClient

_IMAGE = "<|image_pad|>"
_SECONDS = 10.0
_GROWTH_MB = 1_000.0
_REFUSED = ("image_invalid", "image_too_large", "image_timeout")
_FOREIGN = ("0x", "PIL", "Pillow", "Error", "Exception", "Traceback", "/")
"""Signs of a library's or an interpreter's text, which ours have not."""


class Bad(NamedTuple):
    """A picture, what is said of it, and the words that a request about it may end with."""

    name: str
    data: bytes
    words: Sequence[str]
    says: dict[str, Any]


def bad_images(trial: Trial) -> None:
    """Pictures that are too small, long, large, cut, mislabelled or bombs."""
    with trial.seeing() as daemon, trial.client(daemon) as client:
        before = grown = family_usage(daemon.pid).rss_bytes
        beside = client.generate(PROMPT, max_tokens=200)
        found, wrong, foreign, slowest = {}, [], [], 0.0
        for bad in _bad_pictures():
            began = time.monotonic()
            request = client.look(QUESTION, bad.data, says=bad.says, max_tokens=4)
            while not client.ends(request) and seconds_since(began) < 2 * _SECONDS:
                client.listen(0.02)
                grown = max(grown, family_usage(daemon.pid).rss_bytes)
            found[bad.name] = word = client.outcome(request)
            slowest = max(slowest, seconds_since(began))
            answer = client.end(request).answer
            text = str(answer.get("message", ""))
            if word not in bad.words or (word != "length" and not answer.get("field")):
                wrong.append([bad.name, word, answer.get("field")])
            foreign += [text for sign in _FOREIGN if sign in text]
        trial.measured["words"] = found
        trial.expect("not_as_they_should_be", wrong, [])
        trial.expect("texts_that_are_not_ours", foreign, [])
        trial.at_most("slowest_s", slowest, _SECONDS)
        trial.at_most("grown_mb", (grown - before) / 1e6, _GROWTH_MB)
        trial.expect("beside", client.outcome(beside), "length")
        good = client.look(QUESTION, photograph(SIZES[0]), max_tokens=4)
        trial.expect("then", client.outcome(good), "length")


def pictures_and_places(trial: Trial) -> None:
    """More frames than parts, fewer of them, and the words of a placeholder in a user's text."""
    data = photograph(SIZES[0])
    with trial.seeing() as daemon, trial.client(daemon) as client:
        text, part = {"type": "text", "text": QUESTION}, _part(1)
        refusals = []
        for parts, frames in (
            ([text, part, _part(2)], [data]),
            ([text, part], [data, data]),
            ([text], [data]),
            ([text, part], []),
            ([text, {**part, "frame": 0}], [data]),
        ):
            answer = client.end(client.send_parts(parts, *frames, max_tokens=4)).answer
            refusals.append([answer.get("code"), bool(answer.get("field"))])
        codes = {code for code, _ in refusals}
        trial.measured["refusals"] = [code for code, _ in refusals]
        trial.expect("other_codes", codes - {"invalid_value", "unsupported_option"}, set())
        trial.expect("fields_named", all(named for _, named in refusals), wanted=True)
        counts = [
            _placeholders(client, [part, {"type": "text", "text": said}], data)
            for said in (QUESTION, f"{QUESTION} {_IMAGE} {_IMAGE}")
        ]
        trial.measured["placeholders"] = counts[0]
        trial.expect("more_by_the_words_of_one", counts[1] - counts[0], 0)
        alone = client.send_parts([{"type": "text", "text": _IMAGE}], max_tokens=4)
        trial.expect("words_and_no_picture", client.outcome(alone), "length")
        trial.expect("then", client.outcome(client.look(QUESTION, data, max_tokens=4)), "length")


def image_for_a_text_model(trial: Trial) -> None:
    """A picture comes to a model that sees none."""
    with trial.client(trial.shared()) as client:
        if "images" in client.limits:
            raise NotRunError("the model sees")
        answer = client.end(client.look(QUESTION, photograph(SIZES[0]), max_tokens=4)).answer
        field = "messages[0].content[0]"
        found = [answer.get("code"), answer.get("field")]
        trial.one_of("refusal", found, [["unsupported_option", field]])
        trial.expect("then", client.outcome(client.generate(PROMPT, max_tokens=4)), "length")


def _placeholders(client: WireClient, parts: Sequence[dict[str, Any]], data: bytes) -> int:
    """Count the tokens of a prompt that are those of an image."""
    turn = {"role": "user", "content": list(parts)}
    ids = client.ask("tokenize", data, messages=[turn])["tokens"]
    (image,) = client.ask("tokenize", text=_IMAGE)["tokens"]
    return int(ids.count(image))


def _part(frame: int, **says: Any) -> dict[str, Any]:
    return {"type": "image", "frame": frame, **(says or {"format": "jpeg"})}


def _bad_pictures() -> list[Bad]:
    jpeg, small = photograph(SIZES[0]), _png("RGB", 64, 64)
    named, png = {"format": "jpeg"}, {"format": "png"}
    raw = {"encoding": "rgb8", "width": 8, "height": 8, "step": 24}
    either, broken = ("length", *_REFUSED), ("image_invalid",)
    return [
        Bad("1x1", _png("RGB", 1, 1), either, png),
        Bad("1x10000", _png("RGB", 1, 10_000), _REFUSED, png),
        Bad("100 megapixels", _png("1", 10_000, 10_000), ("image_too_large",), png),
        Bad("64 megapixels", _png("RGB", 8_000, 8_000), either, png),
        Bad("bomb in a text chunk", _with_chunk(small, b"zTXt", _bomb()), either, png),
        Bad("truncated", jpeg[: len(jpeg) // 2], broken, named),
        Bad("header alone", jpeg[:200], broken, named),
        Bad("empty", b"", broken, named),
        Bad("noise", bytes(range(256)) * 8, broken, named),
        Bad("another format than said", jpeg, broken, png),
        Bad("another size than its header's", _resized(small, 640, 480), broken, png),
        Bad("fewer raw bytes than its size", bytes(8 * 8 * 3 - 1), broken, raw),
    ]


def _png(mode: str, width: int, height: int) -> bytes:
    file = BytesIO()
    Image.new(mode, (width, height)).save(file, "PNG")
    return file.getvalue()


def _bomb() -> bytes:
    """Text of 64 MB in 64 kB."""
    return b"Comment\0\0" + zlib.compress(bytes(64 << 20), 9)


def _with_chunk(png: bytes, kind: bytes, body: bytes) -> bytes:
    """A PNG file with a chunk behind its header."""
    at = png.index(b"IDAT") - 4
    chunk = struct.pack(">I", len(body)) + kind + body
    return png[:at] + chunk + struct.pack(">I", zlib.crc32(kind + body)) + png[at:]


def _resized(png: bytes, width: int, height: int) -> bytes:
    """A PNG file whose header tells another size than it has."""
    head = b"IHDR" + struct.pack(">II", width, height) + png[24:29]
    return png[:12] + head + struct.pack(">I", zlib.crc32(head)) + png[33:]

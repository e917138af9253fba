"""Pictures for an engine in this process: read, decoded and brought through its vision tower."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hearth.daemon.cli.local_prompts import LocalPrompt, with_turn
from hearth.runtime.config import load_config
from hearth.runtime.device.open import open_device
from hearth.runtime.engine_folder import verify_folder
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.generation.assembly import share_context_memory
from hearth.runtime.image_processing.decoding import decode, patch
from hearth.runtime.image_processing.headers import read_header
from hearth.runtime.images import EmbeddedImage, ImageLayout, Slot
from hearth.runtime.text.conversation import Conversation, Turn, TurnPart
from hearth.runtime.text.tokenizer import Tokenizer
from hearth.runtime.vision.prompt import VisionInput, encode_conversation
from hearth.runtime.vision.vision_runner import LocalEmbeddings, Patches, VisionRunner
from hearth.runtime.vision_config import VISION_FOLDER, VisionConfig, load_vision_config


@dataclass(frozen=True)
class EncodedFiles:
    """Images whose embeddings are in `slots`."""

    config: VisionConfig
    shown: Sequence[VisionInput]
    layouts: Sequence[ImageLayout]
    slots: Sequence[Slot]

    def prompt(self, tokenizer: Tokenizer, text: str, chat: Conversation) -> LocalPrompt:
        """Encode `chat` with a user's message of all images and `text` behind it."""
        asked = [*(TurnPart("image") for _ in self.shown), TurnPart("text", text)]
        chat = with_turn(chat, Turn("user", parts=asked))
        encoded, spans = encode_conversation(tokenizer, chat, self.shown, self.layouts, self.config)
        found = zip(self.slots, self.layouts, spans, strict=True)
        images = [EmbeddedImage(slot, layout.tokens, own) for slot, layout, own in found]
        return LocalPrompt(encoded.ids, chat, encoded.in_reasoning, images)


def encode_files(
    engine: Path, files: Sequence[Path], store: LocalEmbeddings, threads: int
) -> EncodedFiles:
    """Put the embeddings of files into `store`.

    No image becomes more tokens than half of the longest prompt. Raises `unsupported_option` for a
    model without a tower, `image_*` naming the file, `engine_*`, `out_of_memory`.
    """
    config = load_vision_config(engine)
    if config is None:
        raise HearthError("unsupported_option", "this model takes no images", "image")
    text = load_config(engine)
    verify_folder(engine / VISION_FOLDER, config, digests=True)
    most = text.max_supported_input_length // 2
    shown, patches = [], []
    for file in files:
        with _named(file):
            data = memoryview(file.read_bytes())
            one = VisionInput([read_header(data)])
            layout = one.layout(config, most)
            cut = np.empty((layout.patches, config.patch_bytes), np.uint8)
            patch(decode(data, one.pictures[0]), layout, config, cut)
        shown.append(one)
        patches.append((cut, layout))
    slots = [store.put(one) for one in _embedded(engine, config, patches, threads)]
    return EncodedFiles(config, shown, [layout for _, layout in patches], slots)


def _embedded(
    engine: Path, config: VisionConfig, patches: Sequence[tuple[Patches, ImageLayout]], threads: int
) -> list[NDArray[Any]]:
    folder, options = engine / VISION_FOLDER, EngineOptions(threads=threads)
    with (
        closing(open_device(config.device)) as device,
        closing(VisionRunner.open(folder, config, options, device)) as runner,
    ):
        share_context_memory([runner.executor], device)
        return runner.encode(patches)


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """Name the file in errors raised within the block."""
    try:
        yield
    except OSError as error:
        text = f"{file} cannot be read ({error.strerror})"
        raise HearthError("image_invalid", text, "image") from error
    except HearthError as error:
        raise HearthError(error.code, f"{file}: {error.message}", "image") from error

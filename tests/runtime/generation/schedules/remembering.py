"""A simulated engine whose tokens depend on every slot of a row's cache, and its pure form.

The key of a token is a number of token and position; the state at a token is the sum of the keys
that it sees, each by the weight of its slot, and logits follow from the state alone. So a wrong
slot, row, length or token changes all that follows, and one number in a row's slots that is not
finite, seen or not, spoils the whole row, as nothing times infinity is not a number. Where it sees
images, positions come from the row's rotary tables, and deepstack features are part of a key.
"""

import hashlib
from collections.abc import Sequence
from math import prod
from random import Random
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from hearth.runtime.config import RopeConfig
from hearth.runtime.device.device import Stream
from hearth.runtime.executor.engine import Binding
from hearth.runtime.executor.simulated_engine import SimulatedEngine, simulated_config
from hearth.runtime.image_processing.local_embeddings import LocalEmbeddings
from hearth.runtime.image_processing.positions import row_positions
from hearth.runtime.images import EmbeddedImage, ImageSpan
from hearth.runtime.request import RequestOptions, RowToken
from hearth.runtime.sampling import sample_rows
from hearth.runtime.sampling.row_sampler import RowSampler
from tests.runtime.generation.schedules.alone import Voice
from tests.runtime.generation.schedules.trial import Reply

VOCAB, SLOTS, ROWS, CHUNK = 40, 64, 4, 16
END, POISON = 0, 7
CONFIG = simulated_config(
    vocab_size=VOCAB,
    layers=1,
    max_batch=ROWS,
    capacity=SLOTS,
    prefill_chunk=CHUNK,
    eos_token_ids=(END,),
)
SEES = structs.replace(
    CONFIG,
    head_dim=6,
    rotary_dim=6,
    rope_config=RopeConfig(type="mrope", mrope_section=(1, 1, 1)),
    use_context_dependent_rope=True,
    image_token_id=9,
    num_deepstack_features=2,
)
STORE = LocalEmbeddings()
# A token of text stands at its slot on each axis, and so it does in their sum.
_AXES = np.array([2, 3, -4], np.float32)
_NUMBERS = np.random.default_rng(3)
_SLOT_WEIGHTS = _NUMBERS.integers(1, 4000, 2 * SLOTS).astype(np.float64)
_PLACES, _STEPS = np.arange(ROWS)[:, None], np.arange(SLOTS)
_LOGITS = _NUMBERS.normal(scale=2.0, size=(1009, VOCAB)).astype(np.float32)
# Picked now and then, and not by every row.
_LOGITS[:, POISON] -= 1
Floats = NDArray[np.float64]


def logits_of(states: Floats) -> NDArray[np.float32]:
    """Logits [..., V] of states [...]; none of them is finite where the state is not."""
    healthy = np.isfinite(states)
    found = _LOGITS[np.where(healthy, states, 0).astype(np.int64) % len(_LOGITS)]
    return np.where(healthy[..., None], found, np.float32(np.nan))


def key_of(tokens: NDArray[np.float32], positions: NDArray[Any]) -> NDArray[np.float32]:
    """The keys of tokens at positions; not a number for the poisoned token."""
    keys: NDArray[np.float32] = ((tokens + 1) * 64 + positions).astype(np.float32)
    keys[tokens == POISON] = np.nan
    return keys


class RememberingRun:
    """A captured step: it reads its buffers anew at each launch."""

    def __init__(self, engine: "RememberingEngine", bindings: Sequence[Binding]) -> None:
        self._engine, self._bindings = engine, bindings

    def launch(self, stream: Stream) -> None:
        """Run the step."""
        self._engine.run(self._bindings, stream)

    def close(self) -> None:
        """Nothing is held."""


class RememberingEngine(SimulatedEngine):
    """Each step writes its keys behind the filled slots and reads all of its rows."""

    def capture(  # type: ignore[override] # a run of its own
        self, bindings: Sequence[Binding], _stream: Stream
    ) -> RememberingRun:
        """Keep the step."""
        return RememberingRun(self, bindings)

    def run(self, bindings: Sequence[Binding], _stream: Stream) -> None:
        """Write keys and logits."""
        arrays = {one.name: one.tensor.view(one.shape) for one in bindings}
        start, cache = arrays["kvcache_start_index"], arrays["k_cache_0"][:, 0]
        places = arrays["attention_pos_id"]
        if "rope_cos" in arrays:
            places = np.take_along_axis(arrays["rope_cos"], places[..., None], axis=1) @ _AXES
        keys = key_of(arrays["inputs_embeds"][..., 0], places)
        for feature in range(SEES.num_deepstack_features if "rope_cos" in arrays else 0):
            keys += (feature + 2) * arrays[f"deepstack_embeds_{feature}"][..., 0]
        rows, width = keys.shape
        room = cache.shape[1]
        # Padding at the end of a cache is written behind it, where nobody looks.
        seen = np.zeros((rows, room + width), np.float32)
        seen[:, :room] = cache[:, :, 0]
        written = _PLACES[:rows], start[:rows, None] + _STEPS[:width]
        seen[written] = keys
        weighed = seen * _SLOT_WEIGHTS[: room + width]
        states = np.cumsum(weighed, axis=1)[written]
        spoiled = np.isnan(weighed[:, :room]).any(axis=1)
        if spoiled.any():
            states[spoiled] = np.nan
            # Deeper layers write what they have read.
            keys[spoiled] = np.nan
            seen[written] = keys
        cache[...] = seen[:, :room, None]
        arrays["logits"][...] = logits_of(states[_PLACES[:rows], arrays["last_token_ids"]])


def text_of(voice: Voice) -> Reply:
    """The reply to a voice, as long as there is room, without any runtime."""
    tokens = list(voice.prompt)
    options = structs.replace(voice.options, logprobs=20)
    reply, sampler = Reply(), RowSampler(options, tokens, len(tokens), VOCAB)
    while len(tokens) < SLOTS and not reply.end:
        keys = _keys(voice, tokens)
        logits = logits_of((keys * _SLOT_WEIGHTS[: len(tokens)]).sum(keepdims=True))
        (sample,) = sample_rows(logits, [sampler], [len(tokens)])
        if sample is None:
            reply.end = "non_finite"
            break
        sampler.accept(sample.token_id)
        tokens.append(sample.token_id)
        if sample.token_id == END and not voice.options.ignore_eos:
            reply.end = "stop"
        reply.tokens.append(RowToken(0, sample.token_id, sample.logprob, sample.top))
    reply.end = reply.end or "length"
    return reply


def _keys(voice: Voice, tokens: Sequence[int]) -> NDArray[np.float32]:
    """The keys of all tokens of a row, with those of its images."""
    embeds = np.zeros((1 + SEES.num_deepstack_features, len(tokens)), np.float32)
    embeds[0] = tokens
    places = np.arange(len(tokens), dtype=np.float32)
    if voice.images:
        spans = [span for image in voice.images for span in image.spans]
        prompt, delta = row_positions(len(voice.prompt), spans)
        places += delta
        places[: prompt.shape[1]] = prompt.T @ _AXES
    for image in voice.images:
        for start, length, first, *_ in map(structs.astuple, image.spans):
            found = STORE.read(image)[:, first : first + length, 0]
            embeds[:, start : start + length] = found
    keys = key_of(embeds[0], places)
    return keys + np.arange(2, 1 + len(embeds), dtype=np.float32) @ embeds[1:]


def pictured_voices() -> list[Voice]:
    """Prompts with images, and with ids of text in their places, which count for nothing.

    Every third one begins as the one before it does, and half of these have another image there.
    """
    random = Random(6)
    found: list[Voice] = []
    healthy = [token for token in range(1, VOCAB) if token != POISON]
    for number in range(32):
        prompt, images = random.choices(healthy, k=random.randrange(4)), []
        for _ in range(1 + number % 2):
            grids = [(1, 2, 3), (1, 3, 1), (1, 1, 1), (2, 1, 2), (1, 4, 4), (0, 0, 0)]
            grid = random.choice(grids)
            length = prod(grid) or 5
            values = np.random.default_rng(len(found)).integers(41, 90, (3, length + 2, 1))
            values[:, [0, -1]] = POISON  # Nothing but a span of it is read.
            span = ImageSpan(len(prompt), length, 1, grid)
            images.append(_image(values.astype(np.float32), span))
            prompt += random.choices(range(1, VOCAB), k=length)
            prompt += random.choices(healthy, k=random.randrange(1, 6))
        options = RequestOptions(seed=number, ignore_eos=number % 3 == 0, temperature=number % 2)
        if number % 3 == 2:
            known = found[-1]
            prompt = [*known.prompt, *random.choices(healthy, k=random.randrange(1, 9))]
            images = list(known.images)
            if number % 2:
                (span,), other = images[0].spans, np.full((3, images[0].tokens, 1), 42 + number)
                images[0] = _image(other.astype(np.float32), span)
        found.append(Voice(tuple(prompt), options, tuple(images)))
    return found


def _image(values: NDArray[np.float32], span: ImageSpan) -> EmbeddedImage:
    key = hashlib.blake2b(values.tobytes(), digest_size=16).digest()
    return EmbeddedImage(STORE.put(values), values.shape[1], (span,), key)


def voices() -> list[Voice]:
    """Prompts up to the chunk and beyond, greedy and sampled, one in eight of them poisoned.

    Half of the longer ones begin alike, some way.
    """
    random = Random(5)
    found = []
    healthy = [token for token in range(1, VOCAB) if token != POISON]
    shared = random.choices(healthy, k=40)
    for number in range(64):
        prompt = random.choices(healthy, k=random.choice((1, 3, 9, 15, 16, 17, 24, 40)))
        if number % 2:
            alike = random.randrange(len(prompt))
            prompt[:alike] = shared[:alike]
        if number % 8 == 7:
            prompt[random.randrange(len(prompt))] = POISON
        sampling: dict[str, float] = {"temperature": 0.8} if number % 2 else {}
        sampling |= random.choice(({}, {"repetition_penalty": 1.5}, {"presence_penalty": 1.0}))
        options = RequestOptions(seed=number, ignore_eos=number % 3 == 0, **sampling)  # type: ignore[arg-type] # numbers
        found.append(Voice(tuple(prompt), options))
    return found

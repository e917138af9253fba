"""The special tokens around and in place of pictures."""

from pathlib import Path

from tokenizers import Tokenizer

from runtime.engine_folder import TOKENIZER_FILE
from runtime.errors import HearthError
from runtime.export.json_file import Fields
from runtime.vision_config import Family, VisionTokens

_FAKE, _GLOBAL = "<fake_token_around_image>", "<global-img>"


def read_tokens(folder: Path, family: Family, fields: Fields) -> VisionTokens:
    """The tokens that config.json names by id, and those of Idefics3, which has them by text.

    Raises `tokenizer_mismatch` for one that the tokenizer lacks.
    """
    path = folder / TOKENIZER_FILE
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise HearthError("model_invalid", f"{path.name} is not a tokenizer", path.name) from error
    if family == "idefics3":
        around, whole = (_id(tokenizer, text) for text in (_FAKE, _GLOBAL))
        tokens = VisionTokens(
            image=fields.size("image_token_id"), fake_around=around, global_image=whole
        )
    else:
        tokens = VisionTokens(
            image=fields.size("image_token_id"),
            video=fields.size("video_token_id"),
            vision_start=fields.size("vision_start_token_id"),
            vision_end=fields.size("vision_end_token_id"),
        )
    for number in (tokens.image, tokens.video, tokens.vision_start, tokens.vision_end):
        if number >= 0 and tokenizer.id_to_token(number) is None:
            raise _lacks(str(number))
    return tokens


def _id(tokenizer: Tokenizer, text: str) -> int:
    number = tokenizer.token_to_id(text)
    if number is None:
        raise _lacks(text)
    return int(number)


def _lacks(token: str) -> HearthError:
    return HearthError(
        "tokenizer_mismatch", f"{TOKENIZER_FILE} lacks the model's token {token}", TOKENIZER_FILE
    )

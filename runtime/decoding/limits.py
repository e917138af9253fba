from math import inf, prod

from runtime.config import LLMEngineRunnerConfig
from runtime.errors import HearthError
from runtime.pictures.positions import row_positions
from runtime.request import RowRequest
from runtime.rows import tokens_to_generate


def check_row(config: LLMEngineRunnerConfig, row: RowRequest, capacity: int) -> None:
    """Refuse a row that cannot be served to its end; the error names the field.

    `capacity` counts the tokens that a row holds.
    """
    _check_prompt(config, row)
    if row.images:
        _check_images(config, row)
    generated = len(row.token_ids) - row.prompt_length
    wanted = tokens_to_generate(row, capacity)
    if row.prompt_length >= capacity:
        raise HearthError(
            "capacity_exceeded",
            f"the prompt leaves no room in the {capacity} tokens of a row: shorten it",
            "token_ids",
        )
    if wanted <= generated:
        raise HearthError(
            "invalid_value",
            f"max_tokens is {wanted} and {generated} tokens are generated already: "
            "ask for at least one more",
            "max_tokens",
        )
    needed = row.prompt_length + wanted
    if needed > capacity:
        raise HearthError(
            "capacity_exceeded",
            f"prompt and max_tokens need {needed} tokens, a row holds {capacity}: ask for fewer",
            "max_tokens",
        )
    _check_positions(config, row, needed)


def _check_prompt(config: LLMEngineRunnerConfig, row: RowRequest) -> None:
    if not row.token_ids or row.prompt_length < 1:
        raise HearthError("prompt_empty", "the prompt has no tokens", "token_ids")
    if row.prompt_length > len(row.token_ids):
        raise HearthError(
            "invalid_value",
            f"prompt_length is {row.prompt_length}, there are {len(row.token_ids)} tokens",
            "prompt_length",
        )
    if row.prompt_length > config.max_supported_input_length:
        raise HearthError(
            "prompt_too_long",
            f"the prompt has {row.prompt_length} tokens, this engine takes "
            f"{config.max_supported_input_length}",
            "token_ids",
        )
    low, high = min(row.token_ids), max(row.token_ids)
    if low < 0 or high >= config.vocab_size:
        raise HearthError(
            "invalid_value",
            f"token {low if low < 0 else high} is not in the vocabulary of {config.vocab_size}",
            "token_ids",
        )


def _check_images(config: LLMEngineRunnerConfig, row: RowRequest) -> None:
    if not config.image_token_id:
        raise HearthError("unsupported_option", "this model takes no images", "images")
    end = 0
    for index, image in enumerate(row.images):
        for span in image.spans:
            within = end <= span.start and span.start + span.length <= row.prompt_length
            there = span.first >= 0 and span.first + span.length <= image.tokens
            grid = (prod(span.grid) == span.length and min(span.grid) > 0) or not any(span.grid)
            apart = 0.0 <= span.interval < inf
            if not (span.length > 0 and within and there and grid and apart):
                raise HearthError(
                    "invalid_value",
                    f"images[{index}] stands at tokens {span.start} to "
                    f"{span.start + span.length - 1}, which is not in order, not in the prompt "
                    f"of {row.prompt_length} or not what it has",
                    f"images[{index}]",
                )
            end = span.start + span.length


def _check_positions(config: LLMEngineRunnerConfig, row: RowRequest, needed: int) -> None:
    """A video may count faster in time than it has tokens."""
    if not (row.images and config.use_context_dependent_rope):
        return
    spans = [span for image in row.images for span in image.spans]
    prompt, delta = row_positions(row.prompt_length, spans)
    positions = max(needed + delta, 1 + int(prompt.max(initial=0)))
    if positions > config.max_kv_cache_capacity:
        ends = [
            max((prompt[:, one.start : one.start + one.length].max() for one in spans), default=0)
            for spans in (image.spans for image in row.images)
        ]
        raise HearthError(
            "capacity_exceeded",
            f"images put tokens at positions up to {positions}, this engine has "
            f"{config.max_kv_cache_capacity}: take fewer frames of a video, or closer ones",
            f"images[{ends.index(max(ends))}]",
        )

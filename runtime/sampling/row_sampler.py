from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.request import RequestOptions, check_options
from runtime.sampling.draw import draw, tempered
from runtime.sampling.penalties import ScoreAdjustment
from runtime.sampling.philox import UniformSource


class RowSampler:
    """The settings and token history of one row; raises `invalid_value` naming the setting.

    `token_ids` is the prompt and what is generated so far, `prompt_length` tokens of it prompt,
    and `vocab_size` the number of logits. A sampler made from a longer history continues as one
    that has accepted the same tokens one by one.
    """

    def __init__(
        self,
        params: RequestOptions,
        token_ids: Sequence[int],
        prompt_length: int,
        vocab_size: int,
    ) -> None:
        check_options(params, vocab_size)
        self.params = params
        self._adjustment = ScoreAdjustment(params, token_ids, token_ids[prompt_length:], vocab_size)
        self._uniforms = UniformSource(params.seed or 0)

    def accept(self, token_id: int) -> None:
        """Add the token that was picked to the row's history."""
        if self._adjustment.active:
            self._adjustment.accept(token_id)

    def pick(self, logits: NDArray[np.float32], best: int, position: int) -> int | None:
        """The token for `position` from finite `logits` [V] whose argmax is `best`.

        None when penalties and bias have carried the highest score out of float32.
        """
        scores = logits
        if self._adjustment.active:
            scores = self._adjustment.apply(logits)
            best = int(scores.argmax())
        highest = float(scores[best])
        if not np.isfinite(highest):
            return None
        if self.params.temperature == 0:
            return best
        relative = tempered(scores, highest, self.params.temperature)
        return draw(relative, self.params, self._uniforms.at(position))

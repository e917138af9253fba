"""Sampling by row, in NumPy: the specification for kernels on other devices.

The next token of a row comes from its logits in this order:

1. repetition penalty, over the tokens of prompt and generation;
2. presence and frequency penalty, over generated tokens alone;
3. logit bias;
4. at temperature 0 the highest score wins, the lowest id among equals, and nothing below applies;
5. division of (score - highest score) by the temperature;
6. top-k, then top-p of what top-k kept, then min-p;
7. inversion of the cumulative distribution over the kept tokens, in the order of their ids, at
   a uniform number that depends on (seed, position) alone.

Wherever scores are ranked, equal scores rank by lowest id. Log probabilities are natural
logarithms of the model's own distribution: raw logits, temperature 1, before steps 1 to 7.
Scores and weights are float32, sums of weights float64.

Through a token tree (`walk_tree`) the tokens are the same: at each node the one is sampled that
these steps give for the history and position of the node's own path. A child that holds it is
accepted, which for a tree that does not depend on the random numbers happens as often as by
rejection sampling (Leviathan, Kalman and Matias, ICML 2023).
"""

from hearth.runtime.sampling.batch import child_keys, sample_rows, walk_tree
from hearth.runtime.sampling.row_sampler import RowSampler

__all__ = ["RowSampler", "child_keys", "sample_rows", "walk_tree"]

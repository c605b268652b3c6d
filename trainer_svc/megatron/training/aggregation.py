"""How a minibatch's per-token losses become one number."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import ConfigError
from trainer_svc.megatron.training.settings import Aggregation


def token_weights(
    lengths: Sequence[int], *, aggregation: Aggregation, max_tokens: int | None = None
) -> list[float]:
    """The weight of every token of each sample; a minibatch's loss is the weighted sum.

    Computed from the whole minibatch, so that the sum is the same however samples are dealt out to
    micro-batches and ranks.

    - `token_mean`: every token weighs the same. DAPO (arXiv 2503.14476), section 3.3.
    - `sample_mean`: every sample does, and its tokens alike. GRPO (arXiv 2402.03300), equation 3.
    - `constant`: a token's weight depends on no length, neither its sample's nor the others':
      1 / (samples * max_tokens). Dr. GRPO (arXiv 2503.20783), section 3.2 and listing 1.

    Args:
        lengths: completion tokens of every sample, each above 0.
        max_tokens: the longest completion that may be sampled; only `constant` needs it.

    Raises:
        ConfigError: `constant` without `max_tokens`.
    """
    match aggregation:
        case "token_mean":
            return [1 / sum(lengths)] * len(lengths)
        case "sample_mean":
            return [1 / (len(lengths) * length) for length in lengths]
        case "constant":
            if max_tokens is None:
                raise ConfigError(
                    "train.max_tokens: constant aggregation divides by it; set it, or choose "
                    "another train.aggregation"
                )
            return [1 / (len(lengths) * max_tokens)] * len(lengths)

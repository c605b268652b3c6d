"""The tokens of an earlier answer, to be continued."""

from __future__ import annotations

from refit.v1 import rollout_pb2

from common.errors import InvalidField
from rollout_svc.engine import Capabilities
from rollout_svc.generation.sampling import Sampling


def prefix_token_ids(
    request: rollout_pb2.GenerateRequest,
    sampling: Sampling,
    *,
    prompt_tokens: int,
    capabilities: Capabilities,
) -> tuple[int, ...]:
    """The request's prefix, checked; empty where it has none.

    Raises:
        InvalidField: a token id the model lacks, too many tokens, several completions, or a
            parameter that counts what was sampled before.
    """
    prefix = tuple(request.prefix_token_ids)
    if not prefix:
        return ()
    _check_goes_on(sampling)
    if sampling.max_tokens <= len(prefix):
        raise InvalidField(
            f"prefix_token_ids: {len(prefix)} tokens with max_tokens {sampling.max_tokens}, which "
            "counts them and must leave room for one more"
        )
    if prompt_tokens + len(prefix) >= capabilities.max_model_len:
        raise InvalidField(
            f"prefix_token_ids: {len(prefix)} tokens behind a prompt of {prompt_tokens}; the "
            f"model's context of {capabilities.max_model_len} must leave room for one more"
        )
    for token in prefix:
        if not 0 <= token < capabilities.vocab_size:
            raise InvalidField(
                f"prefix_token_ids: {token}; the model's token ids are 0 to "
                f"{capabilities.vocab_size - 1}"
            )
    return prefix


def _check_goes_on(sampling: Sampling) -> None:
    if sampling.n > 1:
        raise InvalidField(f"prefix_token_ids: with n {sampling.n}; one answer goes on at a time")
    structure = sampling.structure.kind.value if sampling.structure else ""
    count_from_the_start = {
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "bad_words": sampling.bad_words,
        structure: sampling.structure,
    }
    for field, value in count_from_the_start.items():
        if value:
            raise InvalidField(
                f"prefix_token_ids: with sampling.{field}, which the engine would apply to new "
                "tokens alone; leave one of them out"
            )
    if sampling.prompt_logprobs is not None:
        raise InvalidField(
            "prefix_token_ids: with sampling.prompt_logprobs, which came with the earlier answer; "
            "leave it out"
        )

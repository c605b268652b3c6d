"""From a request to vLLM's parameters, and from its refusals to this service's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

from common.errors import InvalidField
from rollout_svc.engine import Generation
from rollout_svc.generation.sampling import OPTIONAL, Sampling, Structure, StructureKind

_NAMED_TOKENS = 5

NO_TOKEN_FITS = (
    "it does not compile, or no token fits both it and the other parameters; see the replica's log"
)
"""Of a structure that the engine gave up."""


def vllm_params(generation: Generation, *, detokenize: bool) -> SamplingParams:
    """What vLLM is asked for.

    Args:
        detokenize: whether it is to make text, and to look for stop strings in it.
    """
    sampling, prefix = generation.sampling, len(generation.prefix_token_ids)
    if sampling.max_tokens == 0:
        return _scoring_params(sampling)
    given = {name: value for name in OPTIONAL if (value := getattr(sampling, name)) is not None}
    return SamplingParams(
        n=sampling.n,
        max_tokens=sampling.max_tokens - prefix,
        min_tokens=max(0, sampling.min_tokens - prefix),
        stop=list(sampling.stop) if detokenize else [],
        stop_token_ids=list(sampling.stop_token_ids),
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        ignore_eos=sampling.ignore_eos,
        logit_bias=dict(sampling.logit_bias) or None,
        allowed_token_ids=list(sampling.allowed_token_ids) or None,
        bad_words=list(sampling.bad_words),
        structured_outputs=_structured_outputs(sampling.structure),
        logprobs=sampling.top_logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        flat_logprobs=True,
        detokenize=detokenize,
        output_kind=RequestOutputKind.DELTA,
        # vLLM gives the first token at once, then so many together, and the rest at the end.
        stream_interval=sampling.max_tokens if generation.final_only else None,
        **given,
    )


def _scoring_params(sampling: Sampling) -> SamplingParams:
    """vLLM samples one token at least: greedily, so that this one draws no random number."""
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=sampling.prompt_logprobs,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _structured_outputs(structure: Structure | None) -> StructuredOutputsParams | None:
    if structure is None:
        return None
    match structure.kind:
        case StructureKind.JSON_SCHEMA:
            return StructuredOutputsParams(json=structure.source)
        case StructureKind.REGEX:
            return StructuredOutputsParams(regex=structure.source)
        case StructureKind.GRAMMAR:
            return StructuredOutputsParams(grammar=structure.source)
        case StructureKind.CHOICE:
            return StructuredOutputsParams(choice=list(structure.choices))
        case StructureKind.JSON_OBJECT:
            return StructuredOutputsParams(json_object=True)


def check_tokenizer(sampling: Sampling) -> None:
    """Raises `InvalidField` for what a replica without a tokenizer cannot do."""
    structure = sampling.structure.kind.value if sampling.structure else "structured"
    needs = {"stop": sampling.stop, "bad_words": sampling.bad_words, structure: sampling.structure}
    for field, value in needs.items():
        if value:
            raise InvalidField(
                f"sampling.{field}: this replica runs without a tokenizer; leave it out"
            )


def check_tokens_left(params: SamplingParams, llm: AsyncLLM) -> None:
    """Raises `VLLMValidationError` where no token is left to sample.

    VLLM itself would give token 0 then, with a log-probability that is no number. A structure needs
    no check: there it lets the text end early, or gives the request up.
    """
    if params.structured_outputs or not (params.min_tokens or params.bad_words):
        return
    filled = params.clone()
    inputs = llm.input_processor
    filled.update_from_generation_config(
        inputs.generation_config_fields, inputs.renderer.get_eos_token_id()
    )
    if llm.tokenizer is not None:
        filled.update_from_tokenizer(llm.tokenizer)
    never = {ids[0] for ids in filled.bad_words_token_ids or () if len(ids) == 1}
    if filled.min_tokens:
        never |= filled.all_stop_token_ids
    allowed = params.allowed_token_ids
    if never.issuperset(allowed or range(llm.model_config.get_vocab_size())):
        found = f"{allowed[:_NAMED_TOKENS]}" if allowed else "every token"
        raise VLLMValidationError(
            f"{found}; what ends the answer before min_tokens, or is in bad_words, is not sampled, "
            "so nothing is left; allow another token",
            parameter="allowed_token_ids" if allowed else "stop_token_ids",
        )


@contextmanager
def refusals_named(sampling: Sampling) -> Iterator[None]:
    """vLLM's refusals as this service's, each with the field that it is about."""
    try:
        yield
    except VLLMClientError as error:
        parameter = error.parameter if isinstance(error, VLLMValidationError) else None
        if parameter is None and sampling.structure:
            parameter = sampling.structure.kind.value
        field = f"sampling.{parameter}" if parameter else "request"
        # The message without what vLLM adds to it, which may be a whole list of tokens.
        reason = " ".join(str(error.args[0] if error.args else error).split())
        raise InvalidField(f"{field}: {reason}") from error

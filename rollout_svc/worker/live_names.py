"""From Hugging Face's name of a weight to the live parameter that takes it: pure functions.

vLLM packs q, k and v into one linear, gate and up into another, and the experts of a layer into
two tensors; and it wraps every linear that can take an adapter as `X.base_layer`, whatever adapters
target. So each name is looked up among the live ones.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(\w+)\.(\w+)")
_EXPERT_PARTS = {
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "w13"),
    **dict.fromkeys(("down_proj", "w2"), "w2"),
}
_WRAPPERS = ("", "base_layer.")


def live_names(model: Any, names: Iterable[str]) -> dict[str, str | None]:
    """For each Hugging Face name the parameter of a live vLLM model that takes the tensor."""
    live = {name for name, _ in model.named_parameters()}
    packed = getattr(model, "packed_modules_mapping", {})
    return {name: live_name(name, live, packed) for name in names}


def live_name(name: str, live: Collection[str], packed: Mapping[str, Sequence[str]]) -> str | None:
    """The live parameter that takes tensor `name`, or a part of which does; None without one.

    Args:
        live: names of the model's parameters.
        packed: for each packed linear the projections that are in it.
    """
    return next((found for found in _candidates(name, packed) if found in live), None)


def _candidates(name: str, packed: Mapping[str, Sequence[str]]) -> Iterator[str]:
    module, _, leaf = name.rpartition(".")
    parent, _, own = module.rpartition(".")
    wholes = [whole for whole, parts in packed.items() if own in parts]
    for part in (own, *wholes):
        place = f"{parent}.{part}" if parent else part
        yield from (f"{place}.{wrapper}{leaf}" for wrapper in _WRAPPERS)
    expert = _EXPERT.fullmatch(name)
    if expert and (part := _EXPERT_PARTS.get(expert[2], "")):
        for wrapper in _WRAPPERS:
            for inner in ("", "routed_experts."):
                yield f"{expert[1]}.{wrapper}{inner}{part}_{expert[3]}"

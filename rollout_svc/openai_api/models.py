"""Model names of the OpenAI endpoint: `base`, `<adapter>` and `<adapter>@<version>`."""

from __future__ import annotations

from typing import Any

from common.adapter import AdapterRef
from common.errors import Incompatible, InvalidField
from rollout_svc.versions.registry import AdapterRegistry
from rollout_svc.versions.selector import Rule, Selector

BASE_MODEL = "base"
_MAX_DIGITS = 19
"""Of a number that fits 64 bits."""


def selector_of(model: Any) -> Selector:
    """What a request's `model` asks for: an adapter's newest version, that very one, or the base.

    Raises:
        InvalidField: it is missing or no text; the base does not answer in silence.
    """
    if not isinstance(model, str) or not model:
        raise InvalidField(
            f"model: missing; say who is to answer: {BASE_MODEL}, ADAPTER or ADAPTER@VERSION"
        )
    if not model.isprintable():
        raise InvalidField("model: not printable; names are those of /v1/models")
    if model == BASE_MODEL:
        return Selector(Rule.BASE)
    adapter, _, version = model.rpartition("@")
    if adapter and version.isascii() and version.isdigit() and len(version) < _MAX_DIGITS:
        return Selector(Rule.EXACT, adapter, int(version))
    return Selector(Rule.LATEST, model)


def model_name(ref: AdapterRef | None) -> str:
    """The one name that only this version has here; None is the base."""
    return f"{ref.adapter}@{ref.version}" if ref else BASE_MODEL


def model_list(registry: AdapterRegistry, *, max_model_len: int) -> dict[str, Any]:
    """The body of `/v1/models`: every name that would be answered now, newest versions first."""
    cards = [] if _base_is_missing(registry) else [_card(BASE_MODEL, None, max_model_len)]
    served = registry.listing()
    for adapter in dict.fromkeys(ref.adapter for ref in served):
        # One called `base`, or `x@3`, has no name that means its newest version.
        if adapter.isprintable() and selector_of(adapter) == Selector(Rule.LATEST, adapter):
            cards.append(_card(adapter, BASE_MODEL, max_model_len))
        newest = Selector(Rule.LATEST, adapter).pick(served)
        # Names have no run, so only that of the newest version is asked.
        versions = [
            ref.version
            for ref in served
            if newest and (ref.adapter, ref.run_id) == (adapter, newest.run_id)
        ]
        for version in sorted(versions, reverse=True):
            cards.append(_card(f"{adapter}@{version}", adapter, max_model_len))
    return {"object": "list", "data": cards}


def _base_is_missing(registry: AdapterRegistry) -> bool:
    try:
        registry.weights.check_base()
    except Incompatible:
        return True
    return False


def _card(name: str, parent: str | None, max_model_len: int) -> dict[str, Any]:
    """As vLLM writes them; `parent` is what this is a version of."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "refit",
        "root": name,
        "parent": parent,
        "max_model_len": max_model_len,
    }

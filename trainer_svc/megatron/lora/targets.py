"""Which modules of the model an adapter goes on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from common.errors import ConfigError
from trainer_svc.megatron.model.names import LINEARS, module_name


def resolve_targets(targets: str | Iterable[str], *, num_layers: int) -> frozenset[str]:
    """Full names of the modules that `targets` means, over all layers of the model.

    A target is a module's own name, or a wildcard over full names
    (`decoder.layers.0.self_attention.linear_qkv`).

    Raises:
        ConfigError: a target matches nothing; the message holds the nearest name.
    """
    names = [module_name(layer, linear) for layer in range(num_layers) for linear in LINEARS]
    if targets == "all-linear":
        return frozenset(names)
    if isinstance(targets, str):
        raise ConfigError(f'target_modules: found "{targets}"; use "all-linear" or a list of names')
    chosen: set[str] = set()
    for target in targets:
        matches = {n for n in names if fnmatchcase(n, target) or n.rpartition(".")[2] == target}
        if not matches:
            raise ConfigError(_no_match(target, names))
        chosen |= matches
    return frozenset(chosen)


def _no_match(target: str, names: list[str]) -> str:
    own = sorted({name.rpartition(".")[2] for name in names})
    candidates = names if "." in target else own
    nearest = difflib.get_close_matches(target, candidates, n=1, cutoff=0.0)[0]
    return (
        f'target_modules: "{target}" matches no module; did you mean "{nearest}"? '
        f"(modules: {', '.join(own)})"
    )

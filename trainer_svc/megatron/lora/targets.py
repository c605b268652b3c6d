"""Which linears of a model, or projections of one, a user's names mean; imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from common.errors import ConfigError
from trainer_svc.megatron.model.linears import Linear, Projection

ROUTER = "router"


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """What a pair can be put on: all projections of a linear, or one."""

    layer: int
    linear: Linear
    expert: int | None
    """Counts over the whole model; None where one adapter is all experts', or none's."""

    projections: tuple[Projection, ...]

    name: str
    """The linear's in the whole model."""

    own_names: tuple[str, ...]
    """What the last part of it may be called, the usual one first."""

    def is_meant(self, pattern: str) -> bool:
        """Whether a name or wildcard means this; the router's must end with its name."""
        if self.own_names[0] == ROUTER and not pattern.endswith(ROUTER):
            return False
        return any(
            fnmatchcase(own, pattern) or fnmatchcase(f"{self.module}.{own}", pattern)
            for own in self.own_names
        )

    @property
    def module(self) -> str:
        """The name without its last part."""
        return self.name.rpartition(".")[0]


def chosen(targets: Sequence[Target], *, field: str, patterns: Iterable[str]) -> set[Target]:
    """The targets that any of the patterns means.

    Raises:
        ConfigError: a pattern means none; the message holds the right name, or the nearest.
    """
    found: set[Target] = set()
    for pattern in patterns:
        matches = {target for target in targets if target.is_meant(pattern)}
        if not matches:
            raise ConfigError(_no_match(targets, field=field, pattern=pattern))
        found |= matches
    return found


def _no_match(targets: Sequence[Target], *, field: str, pattern: str) -> str:
    own = sorted({name for target in targets for name in target.own_names})
    return (
        f'{field}: "{pattern}" matches no module; {_hint(targets, pattern)} '
        f"(modules: {', '.join(own)})"
    )


def _hint(targets: Sequence[Target], pattern: str) -> str:
    """The right name of what is somebody else's name for it, else the nearest one."""
    last = pattern.rpartition(".")[2]
    own_names = {name for target in targets for name in target.own_names}
    for target in targets if last not in own_names else ():
        right = target.own_names[0]
        if last in {projection.own_name for projection in target.projections}:
            return f'that is Hugging Face\'s name, use "{right}"'
        if last in {projection.canonical for projection in target.projections}:
            return f'that is a part of "{right}", use this or set type = "canonical_lora"'
    full = "." in pattern
    names = {
        f"{target.module}.{own}" if full else own for target in targets for own in target.own_names
    }
    nearest = difflib.get_close_matches(pattern, sorted(names), n=1, cutoff=0.0)[0]
    return f'did you mean "{nearest}"?'

"""What one rank cannot do, all ranks refuse alike: none waits for another that gave up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from common.errors import RefitError

T = TypeVar("T")


def together(act: Callable[[], T]) -> T:
    """The result of `act` on this rank, once it has succeeded on every rank; all must call this.

    `act` talks to no other rank.

    Raises:
        RefitError: what `act` raised here, or on the lowest rank on which it raised.
    """
    error: RefitError | None = None
    try:
        result = act()
    except RefitError as own:
        error = own
    errors: list[RefitError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    if first := next((found for found in errors if found is not None), None):
        raise first from error
    return result

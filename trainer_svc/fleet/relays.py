"""Who takes bytes from whom, so that no uplink carries more than `fan_out` streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from trainer_svc.fleet.replica import Replica
from trainer_svc.subscription import Parent


def choose_parent(
    replicas: Sequence[Replica], *, fan_out: int, lost: Collection[str]
) -> Parent | None:
    """The relay nearest to the trainer with room for one more; None is the trainer itself.

    The trainer takes over its limit rather than leave a replica without bytes.

    Args:
        replicas: the fleet without the one that asks. Its own children, if it had any, hang on no
            branch then, so that no circle can close.
        fan_out: streams of one uplink; 0 for no limit.
        lost: ids of relays that the one that asks could not take bytes from.
    """
    children: dict[str, list[Replica]] = {}
    for replica in replicas:
        parent = replica.subscription.parent
        children.setdefault(parent.replica_id if parent else "", []).append(replica)
    nearest = deque(children.get("", []))
    if not fan_out or len(nearest) < fan_out:
        return None
    while nearest:
        replica = nearest.popleft()
        below = children.get(replica.id, [])
        able = replica.passes_on() and replica.id not in lost
        if able and len(below) < fan_out:
            return Parent(replica.id, replica.address)
        nearest.extend(below)
    return None

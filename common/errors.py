"""Every error a user or a peer can cause, each with its one gRPC status.

A message is one line: which field, what was found, what to do.
"""

from __future__ import annotations

from grpc import StatusCode


class RefitError(Exception):
    """Base of all domain errors; `code` is what the peer sees.

    With `retry_after_seconds` it is also told when to come again.
    """

    code = StatusCode.INTERNAL
    retry_after_seconds: float | None = None


class InvalidField(RefitError, ValueError):
    """A request or a configuration holds a value that can never be right."""

    code = StatusCode.INVALID_ARGUMENT


class ConfigError(InvalidField):
    """A configuration cannot be used: unknown key, bad value, missing file."""


class AdapterNotFound(RefitError, LookupError):
    """No such adapter, or not that version of it, is served here."""

    code = StatusCode.NOT_FOUND


class ReplicaNotFound(RefitError, LookupError):
    """No subscription with this replica id is open."""

    code = StatusCode.NOT_FOUND


class AlreadyExists(RefitError):
    """The id is taken by something that is alive, or a version by other bytes."""

    code = StatusCode.ALREADY_EXISTS


class Incompatible(RefitError):
    """Base model, rank, modules or dtype do not fit the other side."""

    code = StatusCode.FAILED_PRECONDITION


class CanaryRefused(Incompatible):
    """The replica's log-probabilities under a new version are not the trainer's."""


class NoRun(RefitError):
    """The call needs a run in progress."""

    code = StatusCode.FAILED_PRECONDITION


class StagingFailed(RefitError, OSError):
    """The staging directory cannot take the update: files, rights or disk."""

    code = StatusCode.UNAVAILABLE


class StagingFull(StagingFailed):
    """The staging file system has no room for the update."""

    code = StatusCode.RESOURCE_EXHAUSTED


class CheckpointFailed(RefitError, OSError):
    """A checkpoint could not be written; the one before is as it was."""

    code = StatusCode.UNAVAILABLE


class QueueFull(RefitError):
    """As many requests, or subscribers, as are taken are here already."""

    code = StatusCode.RESOURCE_EXHAUSTED
    retry_after_seconds = 1.0


class Unauthenticated(RefitError):
    """The call carries no token, or one that nobody knows."""

    code = StatusCode.UNAUTHENTICATED


class PermissionDenied(RefitError):
    """The token is known, but has not the role that the call needs."""

    code = StatusCode.PERMISSION_DENIED


class CorruptUpdate(RefitError):
    """Bytes of an update are missing, misplaced or not what their checksum says."""

    code = StatusCode.DATA_LOSS


class WrongDigest(CorruptUpdate):
    """The bytes came as they were sent, and are not what was published."""


class NotHeld(RefitError):
    """An update refers to a version that is no longer here; the sender is told what is."""

    code = StatusCode.ABORTED


class WaitExpired(RefitError, TimeoutError):
    """What was waited for did not come before the deadline."""

    code = StatusCode.DEADLINE_EXCEEDED


class Unavailable(RefitError):
    """Starting, draining or dead; the same call may succeed later or elsewhere."""

    code = StatusCode.UNAVAILABLE


class WorkerLost(Unavailable):
    """The Megatron ranks ended while a command was running or waiting."""


class WorkerGone(WorkerLost):
    """They ended for good: no restart is left."""

"""TensorBoard event files, written without torch or tensorflow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path


class EventLog:
    """Appends scalars to an event file of its own in `directory`.

    Opening takes about 0.3 s, most of it importing TensorBoard's file format.
    """

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(directory))

    def scalars(self, values: Mapping[str, float], *, step: int) -> None:
        """Write one value a name for `step`; it is on disk when the call returns."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(
            value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        )
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def rewind(self, step: int) -> None:
        """Tell TensorBoard to forget what was written for steps after `step`."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        restart = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=restart))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

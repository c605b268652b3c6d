"""Python runs this at its start where the folder is on PYTHONPATH: a wall clock that can be set.

It is as many seconds ahead as the file that CLOCK_OFFSET_FILE names says.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import ModuleType

import grpc.aio  # noqa: F401

_offset = Path(os.environ["CLOCK_OFFSET_FILE"])
_true_time, _true_time_ns = time.time, time.time_ns

# gRPC makes deadlines from Python's clock for C's to keep, which would have jumped with it.
_true = ModuleType("time")
_true.__dict__.update(vars(time))
for _name, _module in list(sys.modules.items()):
    if _name.split(".")[0] == "grpc" and getattr(_module, "time", None) is time:
        _module.time = _true  # type: ignore[attr-defined]


def _ahead_seconds() -> int:
    return int(_offset.read_text())


time.time = lambda: _true_time() + _ahead_seconds()
time.time_ns = lambda: _true_time_ns() + _ahead_seconds() * 10**9

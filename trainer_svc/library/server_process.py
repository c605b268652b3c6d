"""The child process that serves the fleet, as the training process holds it.

A gRPC server in the interpreter that trains would stream four times slower; so requests go to a
child, over a socket that only the two have.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import BinaryIO

from common.errors import RefitError, Unavailable, WaitExpired
from trainer_svc.megatron.protocol import Json, decode, encode, error_from_json

_SEND_SECONDS = 30
_CLOSE_SECONDS = 15.0
_LAST_LINES = 8
_LAST_BYTES = 8192


class ServerProcess:
    """`python -m trainer_svc.library.server`, and the requests that it has not answered yet.

    Any thread may call any method. When the child ends, or is closed, every open and every later
    request raises Unavailable.
    """

    def __init__(self, log_path: Path | None) -> None:
        self._owner = os.getpid()
        self._log = log_path.open("a+b") if log_path else tempfile.TemporaryFile()  # noqa: SIM115
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._open: dict[int, Future[Json]] = {}
        self._ended = ""
        self._closing = False
        self._socket, theirs = socket.socketpair()
        timeout = struct.pack("ll", _SEND_SECONDS, 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        with theirs:
            self._process = _start(theirs.fileno(), self._log)
        self._reader = threading.Thread(target=self._read, name="refit-publisher", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def request(self, command: str, args: Json) -> Future[Json]:
        """Send a command; requests arrive in the order in which they are sent."""
        if os.getpid() != self._owner:
            raise Unavailable(
                f"publisher: it belongs to process {self._owner}, this one was forked from it; "
                "call it from there"
            )
        reply: Future[Json] = Future()
        with self._sending:
            with self._lock:
                if self._ended:
                    raise Unavailable(self._ended)
                number = next(self._numbers)
                self._open[number] = reply
            try:
                self._socket.sendall(encode({"id": number, "command": command, "args": args}))
            except OSError:
                # It is dead, or takes nothing and half a request is under way: no good any more.
                self._process.kill()
        return reply

    def last_lines(self) -> str:
        """The end of the child's log."""
        start = max(0, os.fstat(self._log.fileno()).st_size - _LAST_BYTES)
        # Not `seek`: the position is the child's as well.
        end = os.pread(self._log.fileno(), _LAST_BYTES, start).decode(errors="replace")
        return "\n".join(end.splitlines()[-_LAST_LINES:])

    def close(self) -> None:
        """End the child; it has a few seconds to say goodbye to its subscribers."""
        if os.getpid() != self._owner:
            return
        self._closing = True
        self._process.terminate()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reader.join()
        self._socket.close()
        self._log.close()

    def _read(self) -> None:
        """Hand out the replies, until the child ends."""
        with contextlib.suppress(ConnectionError), self._socket.makefile("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    self._answer(decode(line))
        status = self._process.wait()
        reason = "publisher: closed" if self._closing else self._why_ended(status)
        with self._lock:
            self._ended = reason
            lost, self._open = self._open, {}
        for reply in lost.values():
            reply.set_exception(Unavailable(reason))

    def _answer(self, message: Json) -> None:
        with self._lock:
            reply = self._open.pop(message["id"])
        if "error" in message:
            reply.set_exception(error_from_json(message["error"]))
        else:
            reply.set_result(message["result"])

    def _why_ended(self, status: int) -> str:
        return (
            f"publisher: its server ended with status {status}; start another. "
            f"Its log ends:\n{self.last_lines()}"
        )


def _start(fd: int, log: BinaryIO) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "trainer_svc.library.server"]
    return subprocess.Popen(
        [*command, "--fd", str(fd), "--parent", str(os.getpid())],
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        # Ctrl-C is the training loop's: it may want to publish once more.
        start_new_session=True,
    )


def result_of(reply: Future[Json], *, command: str, timeout_seconds: float) -> Json:
    """Wait for a reply. Raises WaitExpired, or the error that the child answered with."""
    try:
        return reply.result(timeout_seconds)
    except RefitError as error:
        # Anew, so that its traceback is the caller's and not one that grows with every caller.
        raise type(error)(str(error)) from None
    except TimeoutError as error:
        raise WaitExpired(
            f"publisher: no answer to {command} within {timeout_seconds:g} s"
        ) from error

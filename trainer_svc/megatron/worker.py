"""A Megatron rank: the process that torchrun starts. Rank 0 takes commands from the service.

    python -m torch.distributed.run --standalone --nproc-per-node 1 \
        -m trainer_svc.megatron.worker --socket /run/refit/worker.sock

A domain error is a reply; any other error ends the ranks, and torchrun may start them again. When
the service closes the socket, or dies, the ranks end.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Callable
from datetime import timedelta
from io import BufferedRWPair
from pathlib import Path

import torch
import torch.distributed as dist

from common.adapter import Dtype
from common.errors import NoRun, RefitError
from trainer_svc.megatron import device
from trainer_svc.megatron.checkpoint import load_checkpoint, save_checkpoint
from trainer_svc.megatron.engine import MegatronTrainer
from trainer_svc.megatron.lora.policies import DEFAULT
from trainer_svc.megatron.protocol import (
    Batch,
    Json,
    decode,
    encode,
    error_to_json,
    manifest_to_json,
)
from trainer_svc.megatron.settings import WorkerSettings

_PR_SET_PDEATHSIG = 1
_NICENESS = 10
_IDLE_TIMEOUT = timedelta(days=365)


class Commands:
    """The commands of the service, each run by every rank; the results are those of rank 0."""

    def __init__(self) -> None:
        self._trainer: MegatronTrainer | None = None
        self._table: dict[str, Callable[[Json], Json]] = {
            "init": self._init,
            "step": self._step,
            "logprobs": self._logprobs,
            "export": self._export,
            "add_adapter": self._add_adapter,
            "ema_update_adapter": self._ema_update_adapter,
            "save": self._save,
            "load": self._load,
        }

    def run(self, command: str, args: Json) -> Json:
        """Run one command; a key of the table, else KeyError."""
        return self._table[command](args)

    @property
    def trainer(self) -> MegatronTrainer:
        if self._trainer is None:
            raise NoRun("worker: no model is loaded; send init first")
        return self._trainer

    def _init(self, args: Json) -> Json:
        self._trainer = None
        self._trainer = MegatronTrainer(WorkerSettings.model_validate(args["settings"]))
        return {"world_size": dist.get_world_size()}

    def _step(self, args: Json) -> Json:
        with self.trainer.movable_base.resident():
            return dict(self.trainer.step(Batch.from_json(args["batch"])))

    def _logprobs(self, args: Json) -> Json:
        with self.trainer.movable_base.resident():
            return {"logprobs": self.trainer.logprobs(Batch.from_json(args["batch"]))}

    def _export(self, args: Json) -> Json:
        path, fingerprint = Path(args["path"]), args["base_fingerprint"]
        if args["merged"]:
            with self.trainer.movable_base.resident():
                manifest = self.trainer.export_merged(path, base_fingerprint=fingerprint)
        else:
            dtype = Dtype(args["dtype"]) if args["dtype"] else None
            manifest = self.trainer.export(
                path, base_fingerprint=fingerprint, dtype=dtype, adapter=args["adapter"]
            )
        return {"manifest": manifest_to_json(manifest) if manifest else None}

    def _add_adapter(self, args: Json) -> Json:
        self.trainer.policies.add_adapter(args["name"])
        return {}

    def _ema_update_adapter(self, args: Json) -> Json:
        self.trainer.policies.ema_update_adapter(DEFAULT, args["target"], decay=args["decay"])
        return {}

    def _save(self, args: Json) -> Json:
        save_checkpoint(self.trainer, Path(args["path"]), state=args["state"])
        return {}

    def _load(self, args: Json) -> Json:
        return {"state": load_checkpoint(self.trainer, Path(args["path"]))}


class Link:
    """Rank 0's end of the service's socket; every rank has one and sees the same requests."""

    def __init__(self, socket_path: Path) -> None:
        # The ranks wait here between commands, however long the rollouts take.
        self._group = dist.new_group(backend="gloo", timeout=_IDLE_TIMEOUT)
        self._stream: BufferedRWPair | None = None
        if dist.get_rank() == 0:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.connect(str(socket_path))
            self._stream = connection.makefile("rwb")

    def receive(self) -> Json | None:
        """The next request, on every rank; None when the service is gone."""
        line = self._stream.readline() if self._stream else b""
        box = [decode(line) if line else None]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def send(self, reply: Json) -> None:
        """Send the reply, from rank 0."""
        if self._stream:
            self._stream.write(encode(reply))
            self._stream.flush()


def serve(link: Link) -> None:
    """Run requests until `stop`, or until the service is gone."""
    commands = Commands()
    while (request := link.receive()) is not None:
        if request["command"] == "stop":
            link.send({"id": request["id"], "result": {}})
            return
        try:
            reply: Json = {"result": commands.run(request["command"], request["args"])}
        except RefitError as error:
            reply = {"error": error_to_json(error)}
        link.send({"id": request["id"]} | reply)


def main() -> None:
    """Entry point of every rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="the service's Unix socket")
    args = parser.parse_args()
    _end_with_parent()
    _give_way()
    dist.init_process_group(device.BACKEND)
    if device.HAVE_CUDA:
        torch.cuda.set_device(dist.get_node_local_rank())
    serve(Link(args.socket))
    dist.destroy_process_group()


def _give_way() -> None:
    """The service answers health checks and streams adapters while a step has every core.

    Where Linux groups sessions (autogroup), niceness counts only within one, and torchrun's session
    is not the service's: the group has a niceness of its own.
    """
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_NICENESS))


def _end_with_parent() -> None:
    """Be killed when torchrun's agent is: a rank that outlives it would hold memory for ever."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()

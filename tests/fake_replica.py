"""A replica without an engine, for tests that are not asynchronous themselves."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from refit.v1 import (
    adapter_pb2,
    adapter_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    tensor_pb2,
    version_pb2,
)

from common.model_dir import base_model
from common.rules import Rules
from common.wire import ManifestReader

SECONDS = 10.0
_AGAIN_SECONDS = 0.05


class FakeReplica(rollout_pb2_grpc.RolloutServiceServicer):
    """Subscribes, reports every update as committed, and answers with the newest one's name."""

    def __init__(self, trainer: str, model: Path) -> None:
        self.received: dict[bytes, bytes] = {}
        self.rules: dict[tuple[str, int], Rules] = {}
        """Those of the versions that came as updates."""

        self.requests: list[rollout_pb2.GenerateRequest] = []
        self.error: grpc.StatusCode | None = None
        self._held: dict[str, version_pb2.AdapterRef] = {}
        self._model = model
        self._server = grpc.server(ThreadPoolExecutor(4))
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        self._channel = grpc.insecure_channel(trainer)
        self._stub = adapter_pb2_grpc.AdapterServiceStub(self._channel)
        self._thread = threading.Thread(target=self._follow)
        self._left = threading.Event()

    def __enter__(self) -> FakeReplica:
        self._server.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._channel.close()
        self._thread.join()
        self._server.stop(0).wait()

    def _subscription(self) -> adapter_pb2.AdapterUpdateRequest:
        return adapter_pb2.AdapterUpdateRequest(
            replica_id=f"r{self._port}",
            advertised_address=f"127.0.0.1:{self._port}",
            base_model=version_pb2.BaseModel(fingerprint=base_model(self._model).fingerprint),
            capabilities=adapter_pb2.ReplicaCapabilities(
                max_rank=8,
                max_loras=4,
                target_modules=["q_proj"],
                dtypes=[tensor_pb2.DTYPE_FLOAT32],
            ),
        )

    def _follow(self) -> None:
        """Take updates; where the trainer has no version yet, ask again."""
        while not self._left.wait(_AGAIN_SECONDS):
            # ValueError: the channel was closed.
            with contextlib.suppress(grpc.RpcError, ValueError):
                self._receive()

    def _receive(self) -> None:
        flat = b""
        for event in self._stub.AdapterUpdate(self._subscription(), wait_for_ready=True):
            if event.HasField("manifest"):
                flat = b""
                reader = ManifestReader(event.manifest)
                self.rules[reader.ref.adapter, reader.ref.version] = reader.rules
            elif event.HasField("chunk"):
                flat += event.chunk.data
            elif event.HasField("commit"):
                self._commit(event.commit.ref, flat)

    def _commit(self, ref: version_pb2.AdapterRef, flat: bytes) -> None:
        self.received[ref.digest] = flat
        self._held[ref.adapter] = ref
        report = adapter_pb2.ReportAdapterRequest(
            replica_id=f"r{self._port}",
            ref=ref,
            outcome=adapter_pb2.OUTCOME_COMMITTED,
            held=list(self._held.values()),
        )
        self._stub.ReportAdapter(report, timeout=SECONDS)

    def Generate(
        self, request: rollout_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[rollout_pb2.GenerateResponse]:
        self.requests.append(request)
        if self.error:
            context.abort(self.error, "max_tokens: 0; at least 1")
        for index in range(request.n):
            yield rollout_pb2.GenerateResponse(
                index=index,
                token_ids=[*request.token_ids.ids, index],
                logprobs=[-0.5] * len(request.token_ids.ids) + [-2.0],
                text="a",
                adapter=self._held[request.adapter.adapter],
                finish_reason=rollout_pb2.FINISH_REASON_LENGTH,
            )

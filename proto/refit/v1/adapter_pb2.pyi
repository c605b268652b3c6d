from refit.v1 import tensor_pb2 as _tensor_pb2
from refit.v1 import version_pb2 as _version_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AdapterKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADAPTER_KIND_UNSPECIFIED: _ClassVar[AdapterKind]
    ADAPTER_KIND_LORA: _ClassVar[AdapterKind]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_COMMITTED: _ClassVar[Outcome]
    OUTCOME_REFUSED: _ClassVar[Outcome]
ADAPTER_KIND_UNSPECIFIED: AdapterKind
ADAPTER_KIND_LORA: AdapterKind
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_COMMITTED: Outcome
OUTCOME_REFUSED: Outcome

class AdapterUpdateRequest(_message.Message):
    __slots__ = ("replica_id", "advertised_address", "base_model", "capabilities", "adapters", "held")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ADVERTISED_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    advertised_address: str
    base_model: _version_pb2.BaseModel
    capabilities: ReplicaCapabilities
    adapters: _containers.RepeatedScalarFieldContainer[str]
    held: _containers.RepeatedCompositeFieldContainer[_version_pb2.AdapterRef]
    def __init__(self, replica_id: _Optional[str] = ..., advertised_address: _Optional[str] = ..., base_model: _Optional[_Union[_version_pb2.BaseModel, _Mapping]] = ..., capabilities: _Optional[_Union[ReplicaCapabilities, _Mapping]] = ..., adapters: _Optional[_Iterable[str]] = ..., held: _Optional[_Iterable[_Union[_version_pb2.AdapterRef, _Mapping]]] = ...) -> None: ...

class ReplicaCapabilities(_message.Message):
    __slots__ = ("max_rank", "target_modules", "dtypes", "max_loras")
    MAX_RANK_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODULES_FIELD_NUMBER: _ClassVar[int]
    DTYPES_FIELD_NUMBER: _ClassVar[int]
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    max_rank: int
    target_modules: _containers.RepeatedScalarFieldContainer[str]
    dtypes: _containers.RepeatedScalarFieldContainer[_tensor_pb2.Dtype]
    max_loras: int
    def __init__(self, max_rank: _Optional[int] = ..., target_modules: _Optional[_Iterable[str]] = ..., dtypes: _Optional[_Iterable[_Union[_tensor_pb2.Dtype, str]]] = ..., max_loras: _Optional[int] = ...) -> None: ...

class AdapterUpdateResponse(_message.Message):
    __slots__ = ("manifest", "chunk", "commit", "retire", "heartbeat")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    RETIRE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    manifest: AdapterManifest
    chunk: AdapterChunk
    commit: AdapterCommit
    retire: AdapterRetire
    heartbeat: Heartbeat
    def __init__(self, manifest: _Optional[_Union[AdapterManifest, _Mapping]] = ..., chunk: _Optional[_Union[AdapterChunk, _Mapping]] = ..., commit: _Optional[_Union[AdapterCommit, _Mapping]] = ..., retire: _Optional[_Union[AdapterRetire, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class AdapterManifest(_message.Message):
    __slots__ = ("ref", "kind", "base_fingerprint", "lora", "tensors", "total_bytes")
    REF_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BASE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    ref: _version_pb2.AdapterRef
    kind: AdapterKind
    base_fingerprint: str
    lora: LoraConfig
    tensors: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.TensorSpec]
    total_bytes: int
    def __init__(self, ref: _Optional[_Union[_version_pb2.AdapterRef, _Mapping]] = ..., kind: _Optional[_Union[AdapterKind, str]] = ..., base_fingerprint: _Optional[str] = ..., lora: _Optional[_Union[LoraConfig, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[_tensor_pb2.TensorSpec, _Mapping]]] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class LoraConfig(_message.Message):
    __slots__ = ("rank", "alpha", "target_modules", "use_rslora")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODULES_FIELD_NUMBER: _ClassVar[int]
    USE_RSLORA_FIELD_NUMBER: _ClassVar[int]
    rank: int
    alpha: float
    target_modules: _containers.RepeatedScalarFieldContainer[str]
    use_rslora: bool
    def __init__(self, rank: _Optional[int] = ..., alpha: _Optional[float] = ..., target_modules: _Optional[_Iterable[str]] = ..., use_rslora: bool = ...) -> None: ...

class AdapterChunk(_message.Message):
    __slots__ = ("offset_bytes", "data", "crc32c")
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    offset_bytes: int
    data: bytes
    crc32c: int
    def __init__(self, offset_bytes: _Optional[int] = ..., data: _Optional[bytes] = ..., crc32c: _Optional[int] = ...) -> None: ...

class AdapterCommit(_message.Message):
    __slots__ = ("ref",)
    REF_FIELD_NUMBER: _ClassVar[int]
    ref: _version_pb2.AdapterRef
    def __init__(self, ref: _Optional[_Union[_version_pb2.AdapterRef, _Mapping]] = ...) -> None: ...

class AdapterRetire(_message.Message):
    __slots__ = ("ref",)
    REF_FIELD_NUMBER: _ClassVar[int]
    ref: _version_pb2.AdapterRef
    def __init__(self, ref: _Optional[_Union[_version_pb2.AdapterRef, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("interval_seconds",)
    INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    interval_seconds: float
    def __init__(self, interval_seconds: _Optional[float] = ...) -> None: ...

class ReportAdapterRequest(_message.Message):
    __slots__ = ("replica_id", "ref", "outcome", "reason", "timings", "bound_modules")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    REF_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    BOUND_MODULES_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    ref: _version_pb2.AdapterRef
    outcome: Outcome
    reason: str
    timings: UpdateTimings
    bound_modules: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, replica_id: _Optional[str] = ..., ref: _Optional[_Union[_version_pb2.AdapterRef, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., reason: _Optional[str] = ..., timings: _Optional[_Union[UpdateTimings, _Mapping]] = ..., bound_modules: _Optional[_Iterable[int]] = ...) -> None: ...

class UpdateTimings(_message.Message):
    __slots__ = ("wire_seconds", "stage_seconds", "commit_seconds")
    WIRE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STAGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    wire_seconds: float
    stage_seconds: float
    commit_seconds: float
    def __init__(self, wire_seconds: _Optional[float] = ..., stage_seconds: _Optional[float] = ..., commit_seconds: _Optional[float] = ...) -> None: ...

class ReportAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdapterServiceListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdapterServiceListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[_version_pb2.AdapterRef]
    def __init__(self, adapters: _Optional[_Iterable[_Union[_version_pb2.AdapterRef, _Mapping]]] = ...) -> None: ...

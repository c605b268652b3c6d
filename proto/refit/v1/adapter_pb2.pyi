from refit.v1 import tensor_pb2 as _tensor_pb2
from refit.v1 import version_pb2 as _version_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENCODING_UNSPECIFIED: _ClassVar[Encoding]
    ENCODING_RAW: _ClassVar[Encoding]
    ENCODING_HELD: _ClassVar[Encoding]
    ENCODING_DELTA_ZSTD: _ClassVar[Encoding]

class SwapRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SWAP_RULE_UNSPECIFIED: _ClassVar[SwapRule]
    SWAP_RULE_FINISH: _ClassVar[SwapRule]
    SWAP_RULE_ABORT: _ClassVar[SwapRule]
    SWAP_RULE_CONTINUE: _ClassVar[SwapRule]

class MergeRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MERGE_RULE_UNSPECIFIED: _ClassVar[MergeRule]
    MERGE_RULE_NEVER: _ClassVar[MergeRule]
    MERGE_RULE_ROLLOUT: _ClassVar[MergeRule]

class AdapterKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADAPTER_KIND_UNSPECIFIED: _ClassVar[AdapterKind]
    ADAPTER_KIND_LORA: _ClassVar[AdapterKind]
    ADAPTER_KIND_MERGED: _ClassVar[AdapterKind]
    ADAPTER_KIND_BASE: _ClassVar[AdapterKind]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_COMMITTED: _ClassVar[Outcome]
    OUTCOME_REFUSED: _ClassVar[Outcome]

class MismatchReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISMATCH_REASON_UNSPECIFIED: _ClassVar[MismatchReason]
    MISMATCH_REASON_NO_MODULE: _ClassVar[MismatchReason]
    MISMATCH_REASON_NOT_ADAPTED: _ClassVar[MismatchReason]
    MISMATCH_REASON_SHAPE: _ClassVar[MismatchReason]
    MISMATCH_REASON_RANK: _ClassVar[MismatchReason]
    MISMATCH_REASON_KIND: _ClassVar[MismatchReason]

class UpdateStage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UPDATE_STAGE_UNSPECIFIED: _ClassVar[UpdateStage]
    UPDATE_STAGE_MANIFEST: _ClassVar[UpdateStage]
    UPDATE_STAGE_WIRE: _ClassVar[UpdateStage]
    UPDATE_STAGE_STAGE: _ClassVar[UpdateStage]
    UPDATE_STAGE_LOAD: _ClassVar[UpdateStage]
    UPDATE_STAGE_CANARY: _ClassVar[UpdateStage]
ENCODING_UNSPECIFIED: Encoding
ENCODING_RAW: Encoding
ENCODING_HELD: Encoding
ENCODING_DELTA_ZSTD: Encoding
SWAP_RULE_UNSPECIFIED: SwapRule
SWAP_RULE_FINISH: SwapRule
SWAP_RULE_ABORT: SwapRule
SWAP_RULE_CONTINUE: SwapRule
MERGE_RULE_UNSPECIFIED: MergeRule
MERGE_RULE_NEVER: MergeRule
MERGE_RULE_ROLLOUT: MergeRule
ADAPTER_KIND_UNSPECIFIED: AdapterKind
ADAPTER_KIND_LORA: AdapterKind
ADAPTER_KIND_MERGED: AdapterKind
ADAPTER_KIND_BASE: AdapterKind
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_COMMITTED: Outcome
OUTCOME_REFUSED: Outcome
MISMATCH_REASON_UNSPECIFIED: MismatchReason
MISMATCH_REASON_NO_MODULE: MismatchReason
MISMATCH_REASON_NOT_ADAPTED: MismatchReason
MISMATCH_REASON_SHAPE: MismatchReason
MISMATCH_REASON_RANK: MismatchReason
MISMATCH_REASON_KIND: MismatchReason
UPDATE_STAGE_UNSPECIFIED: UpdateStage
UPDATE_STAGE_MANIFEST: UpdateStage
UPDATE_STAGE_WIRE: UpdateStage
UPDATE_STAGE_STAGE: UpdateStage
UPDATE_STAGE_LOAD: UpdateStage
UPDATE_STAGE_CANARY: UpdateStage

class AdapterUpdateRequest(_message.Message):
    __slots__ = ("replica_id", "advertised_address", "base_model", "capabilities", "adapters", "held", "partial", "run_id", "lost_parents")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ADVERTISED_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LOST_PARENTS_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    advertised_address: str
    base_model: _version_pb2.BaseModel
    capabilities: ReplicaCapabilities
    adapters: _containers.RepeatedScalarFieldContainer[str]
    held: _containers.RepeatedCompositeFieldContainer[_version_pb2.AdapterRef]
    partial: PartialUpdate
    run_id: str
    lost_parents: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, replica_id: _Optional[str] = ..., advertised_address: _Optional[str] = ..., base_model: _Optional[_Union[_version_pb2.BaseModel, _Mapping]] = ..., capabilities: _Optional[_Union[ReplicaCapabilities, _Mapping]] = ..., adapters: _Optional[_Iterable[str]] = ..., held: _Optional[_Iterable[_Union[_version_pb2.AdapterRef, _Mapping]]] = ..., partial: _Optional[_Union[PartialUpdate, _Mapping]] = ..., run_id: _Optional[str] = ..., lost_parents: _Optional[_Iterable[str]] = ...) -> None: ...

class PartialUpdate(_message.Message):
    __slots__ = ("ref", "received_bytes")
    REF_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ref: _version_pb2.AdapterRef
    received_bytes: int
    def __init__(self, ref: _Optional[_Union[_version_pb2.AdapterRef, _Mapping]] = ..., received_bytes: _Optional[int] = ...) -> None: ...

class MergeCapabilities(_message.Message):
    __slots__ = ("target_modules", "layouts")
    TARGET_MODULES_FIELD_NUMBER: _ClassVar[int]
    LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    target_modules: _containers.RepeatedScalarFieldContainer[str]
    layouts: _containers.RepeatedScalarFieldContainer[_tensor_pb2.TensorLayout]
    def __init__(self, target_modules: _Optional[_Iterable[str]] = ..., layouts: _Optional[_Iterable[_Union[_tensor_pb2.TensorLayout, str]]] = ...) -> None: ...

class ReplicaCapabilities(_message.Message):
    __slots__ = ("max_rank", "target_modules", "dtypes", "max_loras", "encodings", "relay", "layouts", "kinds", "needs_base", "merging", "merge", "swap_rules")
    MAX_RANK_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODULES_FIELD_NUMBER: _ClassVar[int]
    DTYPES_FIELD_NUMBER: _ClassVar[int]
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    ENCODINGS_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    NEEDS_BASE_FIELD_NUMBER: _ClassVar[int]
    MERGING_FIELD_NUMBER: _ClassVar[int]
    MERGE_FIELD_NUMBER: _ClassVar[int]
    SWAP_RULES_FIELD_NUMBER: _ClassVar[int]
    max_rank: int
    target_modules: _containers.RepeatedScalarFieldContainer[str]
    dtypes: _containers.RepeatedScalarFieldContainer[_tensor_pb2.Dtype]
    max_loras: int
    encodings: _containers.RepeatedScalarFieldContainer[Encoding]
    relay: bool
    layouts: _containers.RepeatedScalarFieldContainer[_tensor_pb2.TensorLayout]
    kinds: _containers.RepeatedScalarFieldContainer[AdapterKind]
    needs_base: bool
    merging: MergeCapabilities
    merge: MergeRule
    swap_rules: _containers.RepeatedScalarFieldContainer[SwapRule]
    def __init__(self, max_rank: _Optional[int] = ..., target_modules: _Optional[_Iterable[str]] = ..., dtypes: _Optional[_Iterable[_Union[_tensor_pb2.Dtype, str]]] = ..., max_loras: _Optional[int] = ..., encodings: _Optional[_Iterable[_Union[Encoding, str]]] = ..., relay: bool = ..., layouts: _Optional[_Iterable[_Union[_tensor_pb2.TensorLayout, str]]] = ..., kinds: _Optional[_Iterable[_Union[AdapterKind, str]]] = ..., needs_base: bool = ..., merging: _Optional[_Union[MergeCapabilities, _Mapping]] = ..., merge: _Optional[_Union[MergeRule, str]] = ..., swap_rules: _Optional[_Iterable[_Union[SwapRule, str]]] = ...) -> None: ...

class AdapterUpdateResponse(_message.Message):
    __slots__ = ("manifest", "chunk", "commit", "retire", "heartbeat", "tensors", "alias", "parent")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    RETIRE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    manifest: AdapterManifest
    chunk: AdapterChunk
    commit: AdapterCommit
    retire: AdapterRetire
    heartbeat: Heartbeat
    tensors: ManifestTensors
    alias: AdapterAlias
    parent: AdapterParent
    def __init__(self, manifest: _Optional[_Union[AdapterManifest, _Mapping]] = ..., chunk: _Optional[_Union[AdapterChunk, _Mapping]] = ..., commit: _Optional[_Union[AdapterCommit, _Mapping]] = ..., retire: _Optional[_Union[AdapterRetire, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., tensors: _Optional[_Union[ManifestTensors, _Mapping]] = ..., alias: _Optional[_Union[AdapterAlias, _Mapping]] = ..., parent: _Optional[_Union[AdapterParent, _Mapping]] = ...) -> None: ...

class AdapterManifest(_message.Message):
    __slots__ = ("ref", "kind", "base_fingerprint", "lora", "tensors", "total_bytes", "tensor_count", "delta_base", "canary", "swap", "merge")
    REF_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BASE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENSOR_COUNT_FIELD_NUMBER: _ClassVar[int]
    DELTA_BASE_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    SWAP_FIELD_NUMBER: _ClassVar[int]
    MERGE_FIELD_NUMBER: _ClassVar[int]
    ref: _version_pb2.AdapterRef
    kind: AdapterKind
    base_fingerprint: str
    lora: LoraConfig
    tensors: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.TensorSpec]
    total_bytes: int
    tensor_count: int
    delta_base: _version_pb2.AdapterRef
    canary: Canary
    swap: SwapRule
    merge: MergeRule
    def __init__(self, ref: _Optional[_Union[_version_pb2.AdapterRef, _Mapping]] = ..., kind: _Optional[_Union[AdapterKind, str]] = ..., base_fingerprint: _Optional[str] = ..., lora: _Optional[_Union[LoraConfig, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[_tensor_pb2.TensorSpec, _Mapping]]] = ..., total_bytes: _Optional[int] = ..., tensor_count: _Optional[int] = ..., delta_base: _Optional[_Union[_version_pb2.AdapterRef, _Mapping]] = ..., canary: _Optional[_Union[Canary, _Mapping]] = ..., swap: _Optional[_Union[SwapRule, str]] = ..., merge: _Optional[_Union[MergeRule, str]] = ...) -> None: ...

class ManifestTensors(_message.Message):
    __slots__ = ("tensors",)
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.TensorSpec]
    def __init__(self, tensors: _Optional[_Iterable[_Union[_tensor_pb2.TensorSpec, _Mapping]]] = ...) -> None: ...

class Canary(_message.Message):
    __slots__ = ("sequences", "max_difference")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[CanarySequence]
    max_difference: float
    def __init__(self, sequences: _Optional[_Iterable[_Union[CanarySequence, _Mapping]]] = ..., max_difference: _Optional[float] = ...) -> None: ...

class CanarySequence(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class LoraConfig(_message.Message):
    __slots__ = ("rank", "alpha", "target_modules", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODULES_FIELD_NUMBER: _ClassVar[int]
    USE_RSLORA_FIELD_NUMBER: _ClassVar[int]
    USE_DORA_FIELD_NUMBER: _ClassVar[int]
    RANK_PATTERN_FIELD_NUMBER: _ClassVar[int]
    ALPHA_PATTERN_FIELD_NUMBER: _ClassVar[int]
    rank: int
    alpha: float
    target_modules: _containers.RepeatedScalarFieldContainer[str]
    use_rslora: bool
    use_dora: bool
    rank_pattern: _containers.RepeatedCompositeFieldContainer[RankPattern]
    alpha_pattern: _containers.RepeatedCompositeFieldContainer[AlphaPattern]
    def __init__(self, rank: _Optional[int] = ..., alpha: _Optional[float] = ..., target_modules: _Optional[_Iterable[str]] = ..., use_rslora: bool = ..., use_dora: bool = ..., rank_pattern: _Optional[_Iterable[_Union[RankPattern, _Mapping]]] = ..., alpha_pattern: _Optional[_Iterable[_Union[AlphaPattern, _Mapping]]] = ...) -> None: ...

class RankPattern(_message.Message):
    __slots__ = ("module", "rank")
    MODULE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    module: str
    rank: int
    def __init__(self, module: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class AlphaPattern(_message.Message):
    __slots__ = ("module", "alpha")
    MODULE_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    module: str
    alpha: float
    def __init__(self, module: _Optional[str] = ..., alpha: _Optional[float] = ...) -> None: ...

class AdapterChunk(_message.Message):
    __slots__ = ("offset_bytes", "data", "crc32c", "encoding", "decoded_bytes")
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    DECODED_BYTES_FIELD_NUMBER: _ClassVar[int]
    offset_bytes: int
    data: bytes
    crc32c: int
    encoding: Encoding
    decoded_bytes: int
    def __init__(self, offset_bytes: _Optional[int] = ..., data: _Optional[bytes] = ..., crc32c: _Optional[int] = ..., encoding: _Optional[_Union[Encoding, str]] = ..., decoded_bytes: _Optional[int] = ...) -> None: ...

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

class AdapterAlias(_message.Message):
    __slots__ = ("ref",)
    REF_FIELD_NUMBER: _ClassVar[int]
    ref: _version_pb2.AdapterRef
    def __init__(self, ref: _Optional[_Union[_version_pb2.AdapterRef, _Mapping]] = ...) -> None: ...

class AdapterParent(_message.Message):
    __slots__ = ("replica_id", "address", "run_id")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    address: str
    run_id: str
    def __init__(self, replica_id: _Optional[str] = ..., address: _Optional[str] = ..., run_id: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("interval_seconds", "lease_seconds")
    INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    interval_seconds: float
    lease_seconds: float
    def __init__(self, interval_seconds: _Optional[float] = ..., lease_seconds: _Optional[float] = ...) -> None: ...

class ReportAdapterRequest(_message.Message):
    __slots__ = ("replica_id", "ref", "outcome", "reason", "timings", "bound_modules", "stage", "held", "wire_bytes", "canary_difference", "mismatches")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    REF_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    BOUND_MODULES_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CANARY_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    MISMATCHES_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    ref: _version_pb2.AdapterRef
    outcome: Outcome
    reason: str
    timings: UpdateTimings
    bound_modules: _containers.RepeatedScalarFieldContainer[int]
    stage: UpdateStage
    held: _containers.RepeatedCompositeFieldContainer[_version_pb2.AdapterRef]
    wire_bytes: int
    canary_difference: float
    mismatches: _containers.RepeatedCompositeFieldContainer[TensorMismatch]
    def __init__(self, replica_id: _Optional[str] = ..., ref: _Optional[_Union[_version_pb2.AdapterRef, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., reason: _Optional[str] = ..., timings: _Optional[_Union[UpdateTimings, _Mapping]] = ..., bound_modules: _Optional[_Iterable[int]] = ..., stage: _Optional[_Union[UpdateStage, str]] = ..., held: _Optional[_Iterable[_Union[_version_pb2.AdapterRef, _Mapping]]] = ..., wire_bytes: _Optional[int] = ..., canary_difference: _Optional[float] = ..., mismatches: _Optional[_Iterable[_Union[TensorMismatch, _Mapping]]] = ...) -> None: ...

class TensorMismatch(_message.Message):
    __slots__ = ("tensor", "reason", "detail")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    tensor: str
    reason: MismatchReason
    detail: str
    def __init__(self, tensor: _Optional[str] = ..., reason: _Optional[_Union[MismatchReason, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("replica_id", "draining", "reason")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    draining: bool
    reason: str
    def __init__(self, replica_id: _Optional[str] = ..., draining: bool = ..., reason: _Optional[str] = ...) -> None: ...

class RenewLeaseResponse(_message.Message):
    __slots__ = ("lease_seconds",)
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease_seconds: float
    def __init__(self, lease_seconds: _Optional[float] = ...) -> None: ...

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

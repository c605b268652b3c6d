from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetVersionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetVersionResponse(_message.Message):
    __slots__ = ("service", "service_version", "api_version", "git_revision", "engine", "engine_version", "capabilities", "base_model", "adapters")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    SERVICE_VERSION_FIELD_NUMBER: _ClassVar[int]
    API_VERSION_FIELD_NUMBER: _ClassVar[int]
    GIT_REVISION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    service: str
    service_version: str
    api_version: str
    git_revision: str
    engine: str
    engine_version: str
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    base_model: BaseModel
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterRef]
    def __init__(self, service: _Optional[str] = ..., service_version: _Optional[str] = ..., api_version: _Optional[str] = ..., git_revision: _Optional[str] = ..., engine: _Optional[str] = ..., engine_version: _Optional[str] = ..., capabilities: _Optional[_Iterable[str]] = ..., base_model: _Optional[_Union[BaseModel, _Mapping]] = ..., adapters: _Optional[_Iterable[_Union[AdapterRef, _Mapping]]] = ...) -> None: ...

class BaseModel(_message.Message):
    __slots__ = ("name", "fingerprint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class AdapterRef(_message.Message):
    __slots__ = ("run_id", "adapter", "version", "digest")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    adapter: str
    version: int
    digest: bytes
    def __init__(self, run_id: _Optional[str] = ..., adapter: _Optional[str] = ..., version: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

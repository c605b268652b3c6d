from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Dtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[Dtype]
    DTYPE_FLOAT32: _ClassVar[Dtype]
    DTYPE_BFLOAT16: _ClassVar[Dtype]
    DTYPE_FLOAT16: _ClassVar[Dtype]

class TensorLayout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TENSOR_LAYOUT_UNSPECIFIED: _ClassVar[TensorLayout]
    TENSOR_LAYOUT_LORA_A: _ClassVar[TensorLayout]
    TENSOR_LAYOUT_LORA_B: _ClassVar[TensorLayout]
    TENSOR_LAYOUT_MAGNITUDE: _ClassVar[TensorLayout]
    TENSOR_LAYOUT_PACKED_A: _ClassVar[TensorLayout]
    TENSOR_LAYOUT_PACKED_B: _ClassVar[TensorLayout]
    TENSOR_LAYOUT_FLAT_A: _ClassVar[TensorLayout]
    TENSOR_LAYOUT_FLAT_B: _ClassVar[TensorLayout]
    TENSOR_LAYOUT_SWAPPED_A: _ClassVar[TensorLayout]
    TENSOR_LAYOUT_SWAPPED_B: _ClassVar[TensorLayout]
    TENSOR_LAYOUT_WEIGHT: _ClassVar[TensorLayout]
DTYPE_UNSPECIFIED: Dtype
DTYPE_FLOAT32: Dtype
DTYPE_BFLOAT16: Dtype
DTYPE_FLOAT16: Dtype
TENSOR_LAYOUT_UNSPECIFIED: TensorLayout
TENSOR_LAYOUT_LORA_A: TensorLayout
TENSOR_LAYOUT_LORA_B: TensorLayout
TENSOR_LAYOUT_MAGNITUDE: TensorLayout
TENSOR_LAYOUT_PACKED_A: TensorLayout
TENSOR_LAYOUT_PACKED_B: TensorLayout
TENSOR_LAYOUT_FLAT_A: TensorLayout
TENSOR_LAYOUT_FLAT_B: TensorLayout
TENSOR_LAYOUT_SWAPPED_A: TensorLayout
TENSOR_LAYOUT_SWAPPED_B: TensorLayout
TENSOR_LAYOUT_WEIGHT: TensorLayout

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape", "layout", "offset_bytes", "size_bytes", "alias_of", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALIAS_OF_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: Dtype
    shape: _containers.RepeatedScalarFieldContainer[int]
    layout: TensorLayout
    offset_bytes: int
    size_bytes: int
    alias_of: str
    digest: bytes
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[Dtype, str]] = ..., shape: _Optional[_Iterable[int]] = ..., layout: _Optional[_Union[TensorLayout, str]] = ..., offset_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ..., alias_of: _Optional[str] = ..., digest: _Optional[bytes] = ...) -> None: ...

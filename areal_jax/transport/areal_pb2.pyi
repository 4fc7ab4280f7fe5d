from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OnUpdate(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVER_DEFAULT: _ClassVar[OnUpdate]
    RECOMPUTE: _ClassVar[OnUpdate]
    KEEP: _ClassVar[OnUpdate]
    DRAIN: _ClassVar[OnUpdate]
SERVER_DEFAULT: OnUpdate
RECOMPUTE: OnUpdate
KEEP: OnUpdate
DRAIN: OnUpdate

class Samples(_message.Message):
    __slots__ = ("sample", "length", "finish_reason", "tokens", "logprobs", "versions")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    sample: _containers.RepeatedScalarFieldContainer[int]
    length: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _containers.RepeatedScalarFieldContainer[str]
    tokens: bytes
    logprobs: bytes
    versions: bytes
    def __init__(self, sample: _Optional[_Iterable[int]] = ..., length: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Iterable[str]] = ..., tokens: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., versions: _Optional[bytes] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_new_tokens", "temperature", "seed", "stop_tokens", "top_k", "top_p", "min_p", "min_new_tokens", "stop_strings")
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    max_new_tokens: int
    temperature: float
    seed: int
    stop_tokens: _containers.RepeatedScalarFieldContainer[int]
    top_k: int
    top_p: float
    min_p: float
    min_new_tokens: int
    stop_strings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, max_new_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., seed: _Optional[int] = ..., stop_tokens: _Optional[_Iterable[int]] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., min_new_tokens: _Optional[int] = ..., stop_strings: _Optional[_Iterable[str]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("uid", "prompt_tokens", "samples", "sampling", "evaluation", "partial", "timeout_s")
    UID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    uid: int
    prompt_tokens: bytes
    samples: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    evaluation: bool
    partial: Samples
    timeout_s: float
    def __init__(self, uid: _Optional[int] = ..., prompt_tokens: _Optional[bytes] = ..., samples: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., evaluation: bool = ..., partial: _Optional[_Union[Samples, _Mapping]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("version", "checksum", "path", "source", "on_update")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    ON_UPDATE_FIELD_NUMBER: _ClassVar[int]
    version: int
    checksum: int
    path: str
    source: str
    on_update: OnUpdate
    def __init__(self, version: _Optional[int] = ..., checksum: _Optional[int] = ..., path: _Optional[str] = ..., source: _Optional[str] = ..., on_update: _Optional[_Union[OnUpdate, str]] = ...) -> None: ...

class UpdateWeightsReply(_message.Message):
    __slots__ = ("stall_s", "error")
    STALL_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    stall_s: float
    error: str
    def __init__(self, stall_s: _Optional[float] = ..., error: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, float]
    def __init__(self, values: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Trajectories(_message.Message):
    __slots__ = ("uid", "sample", "reward", "truncated", "prompt_length", "length", "prompt_tokens", "tokens", "behav_logprobs", "versions")
    UID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEHAV_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    uid: bytes
    sample: bytes
    reward: bytes
    truncated: bytes
    prompt_length: bytes
    length: bytes
    prompt_tokens: bytes
    tokens: bytes
    behav_logprobs: bytes
    versions: bytes
    def __init__(self, uid: _Optional[bytes] = ..., sample: _Optional[bytes] = ..., reward: _Optional[bytes] = ..., truncated: _Optional[bytes] = ..., prompt_length: _Optional[bytes] = ..., length: _Optional[bytes] = ..., prompt_tokens: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., behav_logprobs: _Optional[bytes] = ..., versions: _Optional[bytes] = ...) -> None: ...

class PutReply(_message.Message):
    __slots__ = ("accepted",)
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    def __init__(self, accepted: bool = ...) -> None: ...

class DiscardRequest(_message.Message):
    __slots__ = ("uid", "count", "cause")
    UID_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    uid: int
    count: int
    cause: str
    def __init__(self, uid: _Optional[int] = ..., count: _Optional[int] = ..., cause: _Optional[str] = ...) -> None: ...

class DiscardReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("version", "timeout_s")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    version: int
    timeout_s: float
    def __init__(self, version: _Optional[int] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class ProgressRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProgressReply(_message.Message):
    __slots__ = ("version", "low", "done", "counted", "lost")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    version: int
    low: int
    done: _containers.RepeatedScalarFieldContainer[int]
    counted: int
    lost: int
    def __init__(self, version: _Optional[int] = ..., low: _Optional[int] = ..., done: _Optional[_Iterable[int]] = ..., counted: _Optional[int] = ..., lost: _Optional[int] = ...) -> None: ...

class AnnouncementsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Announcement(_message.Message):
    __slots__ = ("version", "lost", "finished")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    version: int
    lost: int
    finished: bool
    def __init__(self, version: _Optional[int] = ..., lost: _Optional[int] = ..., finished: bool = ...) -> None: ...

class FetchWeightsRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class WeightsPiece(_message.Message):
    __slots__ = ("data", "version", "checksum", "size")
    DATA_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    version: int
    checksum: int
    size: int
    def __init__(self, data: _Optional[bytes] = ..., version: _Optional[int] = ..., checksum: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

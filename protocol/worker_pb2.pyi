from motley.protocol import mesh_pb2 as _mesh_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerCommand(_message.Message):
    __slots__ = ("start", "peers", "decode", "cancel", "placement", "host", "release", "hold", "vocabulary", "adapter")
    START_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    start: Start
    peers: _mesh_pb2.Peers
    decode: Decode
    cancel: str
    placement: _mesh_pb2.Placement
    host: _mesh_pb2.HostedExperts
    release: _mesh_pb2.Release
    hold: _mesh_pb2.Hold
    vocabulary: Vocabulary
    adapter: _mesh_pb2.AdapterOrder
    def __init__(self, start: _Optional[_Union[Start, _Mapping]] = ..., peers: _Optional[_Union[_mesh_pb2.Peers, _Mapping]] = ..., decode: _Optional[_Union[Decode, _Mapping]] = ..., cancel: _Optional[str] = ..., placement: _Optional[_Union[_mesh_pb2.Placement, _Mapping]] = ..., host: _Optional[_Union[_mesh_pb2.HostedExperts, _Mapping]] = ..., release: _Optional[_Union[_mesh_pb2.Release, _Mapping]] = ..., hold: _Optional[_Union[_mesh_pb2.Hold, _Mapping]] = ..., vocabulary: _Optional[_Union[Vocabulary, _Mapping]] = ..., adapter: _Optional[_Union[_mesh_pb2.AdapterOrder, _Mapping]] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("session", "epoch", "rank", "assignment")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    session: str
    epoch: int
    rank: int
    assignment: _mesh_pb2.Assignment
    def __init__(self, session: _Optional[str] = ..., epoch: _Optional[int] = ..., rank: _Optional[int] = ..., assignment: _Optional[_Union[_mesh_pb2.Assignment, _Mapping]] = ...) -> None: ...

class Decode(_message.Message):
    __slots__ = ("request_id", "prompt", "sampling", "max_tokens", "stop_tokens", "without_drafts", "written", "constraint", "adapter", "priority")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: _containers.RepeatedScalarFieldContainer[int]
    sampling: _mesh_pb2.Sampling
    max_tokens: int
    stop_tokens: _containers.RepeatedScalarFieldContainer[int]
    without_drafts: bool
    written: _containers.RepeatedScalarFieldContainer[int]
    constraint: _mesh_pb2.Constraint
    adapter: _mesh_pb2.Adapter
    priority: int
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_mesh_pb2.Sampling, _Mapping]] = ..., max_tokens: _Optional[int] = ..., stop_tokens: _Optional[_Iterable[int]] = ..., without_drafts: _Optional[bool] = ..., written: _Optional[_Iterable[int]] = ..., constraint: _Optional[_Union[_mesh_pb2.Constraint, _Mapping]] = ..., adapter: _Optional[_Union[_mesh_pb2.Adapter, _Mapping]] = ..., priority: _Optional[int] = ...) -> None: ...

class Vocabulary(_message.Message):
    __slots__ = ("tokenizer_json", "size", "stop")
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    tokenizer_json: str
    size: int
    stop: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokenizer_json: _Optional[str] = ..., size: _Optional[int] = ..., stop: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkerEvent(_message.Message):
    __slots__ = ("listening", "loading", "ready", "failed", "timing", "tokens", "released", "hosted", "experts", "starved", "steps", "activity", "adapter")
    LISTENING_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    HOSTED_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    STARVED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    listening: int
    loading: _mesh_pb2.Loading
    ready: _mesh_pb2.Ready
    failed: _mesh_pb2.Failure
    timing: _mesh_pb2.Timing
    tokens: Tokens
    released: _mesh_pb2.Empty
    hosted: _mesh_pb2.HostedExperts
    experts: _mesh_pb2.ExpertReport
    starved: _mesh_pb2.Starved
    steps: _mesh_pb2.Steps
    activity: _mesh_pb2.Activity
    adapter: _mesh_pb2.AdapterEvent
    def __init__(self, listening: _Optional[int] = ..., loading: _Optional[_Union[_mesh_pb2.Loading, _Mapping]] = ..., ready: _Optional[_Union[_mesh_pb2.Ready, _Mapping]] = ..., failed: _Optional[_Union[_mesh_pb2.Failure, _Mapping]] = ..., timing: _Optional[_Union[_mesh_pb2.Timing, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., released: _Optional[_Union[_mesh_pb2.Empty, _Mapping]] = ..., hosted: _Optional[_Union[_mesh_pb2.HostedExperts, _Mapping]] = ..., experts: _Optional[_Union[_mesh_pb2.ExpertReport, _Mapping]] = ..., starved: _Optional[_Union[_mesh_pb2.Starved, _Mapping]] = ..., steps: _Optional[_Union[_mesh_pb2.Steps, _Mapping]] = ..., activity: _Optional[_Union[_mesh_pb2.Activity, _Mapping]] = ..., adapter: _Optional[_Union[_mesh_pb2.AdapterEvent, _Mapping]] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("request_id", "ids", "finish", "failure", "logprobs", "prefill_s", "cached_tokens", "accepted_drafts", "embedding")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    ids: _containers.RepeatedScalarFieldContainer[int]
    finish: str
    failure: _mesh_pb2.Failure
    logprobs: _containers.RepeatedCompositeFieldContainer[_mesh_pb2.LogprobRow]
    prefill_s: float
    cached_tokens: int
    accepted_drafts: int
    embedding: bytes
    def __init__(self, request_id: _Optional[str] = ..., ids: _Optional[_Iterable[int]] = ..., finish: _Optional[str] = ..., failure: _Optional[_Union[_mesh_pb2.Failure, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[_mesh_pb2.LogprobRow, _Mapping]]] = ..., prefill_s: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., accepted_drafts: _Optional[int] = ..., embedding: _Optional[bytes] = ...) -> None: ...

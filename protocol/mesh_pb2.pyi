from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeMessage(_message.Message):
    __slots__ = ("hello", "heartbeat", "described", "rank", "delta", "leaving", "several", "probed", "lent", "lease", "budget", "done", "relayed", "job")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DESCRIBED_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    SEVERAL_FIELD_NUMBER: _ClassVar[int]
    PROBED_FIELD_NUMBER: _ClassVar[int]
    LENT_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    described: Described
    rank: RankEvent
    delta: Delta
    leaving: Empty
    several: Several
    probed: Probed
    lent: Lent
    lease: Lease
    budget: Budget
    done: Done
    relayed: Relayed
    job: JobEvent
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., described: _Optional[_Union[Described, _Mapping]] = ..., rank: _Optional[_Union[RankEvent, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., leaving: _Optional[_Union[Empty, _Mapping]] = ..., several: _Optional[_Union[Several, _Mapping]] = ..., probed: _Optional[_Union[Probed, _Mapping]] = ..., lent: _Optional[_Union[Lent, _Mapping]] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., budget: _Optional[_Union[Budget, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., relayed: _Optional[_Union[Relayed, _Mapping]] = ..., job: _Optional[_Union[JobEvent, _Mapping]] = ...) -> None: ...

class Several(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[NodeMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[NodeMessage, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "version", "name", "address", "capabilities", "held", "failed", "lease", "jobs", "kept_jobs", "process")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    KEPT_JOBS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    version: str
    name: str
    address: str
    capabilities: Capabilities
    held: _containers.RepeatedCompositeFieldContainer[HeldRank]
    failed: _containers.RepeatedCompositeFieldContainer[RankEvent]
    lease: Lease
    jobs: _containers.RepeatedCompositeFieldContainer[JobEvent]
    kept_jobs: _containers.RepeatedScalarFieldContainer[str]
    process: str
    def __init__(self, protocol: _Optional[int] = ..., version: _Optional[str] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., capabilities: _Optional[_Union[Capabilities, _Mapping]] = ..., held: _Optional[_Iterable[_Union[HeldRank, _Mapping]]] = ..., failed: _Optional[_Iterable[_Union[RankEvent, _Mapping]]] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., jobs: _Optional[_Iterable[_Union[JobEvent, _Mapping]]] = ..., kept_jobs: _Optional[_Iterable[str]] = ..., process: _Optional[str] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("state", "device", "holder", "reason", "expires_at", "trouble")
    STATE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    state: str
    device: str
    holder: str
    reason: str
    expires_at: float
    trouble: str
    def __init__(self, state: _Optional[str] = ..., device: _Optional[str] = ..., holder: _Optional[str] = ..., reason: _Optional[str] = ..., expires_at: _Optional[float] = ..., trouble: _Optional[str] = ...) -> None: ...

class Budget(_message.Message):
    __slots__ = ("memory_bytes", "gpu_bytes")
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_BYTES_FIELD_NUMBER: _ClassVar[int]
    memory_bytes: int
    gpu_bytes: int
    def __init__(self, memory_bytes: _Optional[int] = ..., gpu_bytes: _Optional[int] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("id", "failure")
    ID_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    id: str
    failure: str
    def __init__(self, id: _Optional[str] = ..., failure: _Optional[str] = ...) -> None: ...

class HeldRank(_message.Message):
    __slots__ = ("session", "epoch", "rank")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    session: str
    epoch: int
    rank: int
    def __init__(self, session: _Optional[str] = ..., epoch: _Optional[int] = ..., rank: _Optional[int] = ...) -> None: ...

class Capabilities(_message.Message):
    __slots__ = ("platform", "cpu", "cores", "memory_bytes", "memory_bandwidth", "gpus", "zone", "engines", "expert_engines", "no_gpu", "speeds", "call_s", "gpu_bytes", "cannot_train")
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    CPU_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    EXPERT_ENGINES_FIELD_NUMBER: _ClassVar[int]
    NO_GPU_FIELD_NUMBER: _ClassVar[int]
    SPEEDS_FIELD_NUMBER: _ClassVar[int]
    CALL_S_FIELD_NUMBER: _ClassVar[int]
    GPU_BYTES_FIELD_NUMBER: _ClassVar[int]
    CANNOT_TRAIN_FIELD_NUMBER: _ClassVar[int]
    platform: str
    cpu: str
    cores: int
    memory_bytes: int
    memory_bandwidth: float
    gpus: _containers.RepeatedCompositeFieldContainer[Gpu]
    zone: str
    engines: _containers.RepeatedCompositeFieldContainer[Engine]
    expert_engines: _containers.RepeatedScalarFieldContainer[str]
    no_gpu: str
    speeds: _containers.RepeatedCompositeFieldContainer[FormatSpeed]
    call_s: float
    gpu_bytes: int
    cannot_train: str
    def __init__(self, platform: _Optional[str] = ..., cpu: _Optional[str] = ..., cores: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., memory_bandwidth: _Optional[float] = ..., gpus: _Optional[_Iterable[_Union[Gpu, _Mapping]]] = ..., zone: _Optional[str] = ..., engines: _Optional[_Iterable[_Union[Engine, _Mapping]]] = ..., expert_engines: _Optional[_Iterable[str]] = ..., no_gpu: _Optional[str] = ..., speeds: _Optional[_Iterable[_Union[FormatSpeed, _Mapping]]] = ..., call_s: _Optional[float] = ..., gpu_bytes: _Optional[int] = ..., cannot_train: _Optional[str] = ...) -> None: ...

class FormatSpeed(_message.Message):
    __slots__ = ("format", "bytes_per_s", "row_bytes_per_s")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    format: str
    bytes_per_s: float
    row_bytes_per_s: float
    def __init__(self, format: _Optional[str] = ..., bytes_per_s: _Optional[float] = ..., row_bytes_per_s: _Optional[float] = ...) -> None: ...

class Engine(_message.Message):
    __slots__ = ("name", "keeps_fp16", "on_gpu", "lacking", "has_whole_caches", "memory_bandwidth", "layer_s", "host_s", "cache_formats", "reads_far_blocks", "asks_block_holders", "keeps_windows", "keeps_prefixes", "embeds", "speeds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEEPS_FP16_FIELD_NUMBER: _ClassVar[int]
    ON_GPU_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    HAS_WHOLE_CACHES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    LAYER_S_FIELD_NUMBER: _ClassVar[int]
    HOST_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_FORMATS_FIELD_NUMBER: _ClassVar[int]
    READS_FAR_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ASKS_BLOCK_HOLDERS_FIELD_NUMBER: _ClassVar[int]
    KEEPS_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    KEEPS_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    EMBEDS_FIELD_NUMBER: _ClassVar[int]
    SPEEDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    keeps_fp16: bool
    on_gpu: bool
    lacking: str
    has_whole_caches: bool
    memory_bandwidth: float
    layer_s: float
    host_s: float
    cache_formats: _containers.RepeatedScalarFieldContainer[str]
    reads_far_blocks: bool
    asks_block_holders: bool
    keeps_windows: bool
    keeps_prefixes: bool
    embeds: bool
    speeds: _containers.RepeatedCompositeFieldContainer[FormatSpeed]
    def __init__(self, name: _Optional[str] = ..., keeps_fp16: _Optional[bool] = ..., on_gpu: _Optional[bool] = ..., lacking: _Optional[str] = ..., has_whole_caches: _Optional[bool] = ..., memory_bandwidth: _Optional[float] = ..., layer_s: _Optional[float] = ..., host_s: _Optional[float] = ..., cache_formats: _Optional[_Iterable[str]] = ..., reads_far_blocks: _Optional[bool] = ..., asks_block_holders: _Optional[bool] = ..., keeps_windows: _Optional[bool] = ..., keeps_prefixes: _Optional[bool] = ..., embeds: _Optional[bool] = ..., speeds: _Optional[_Iterable[_Union[FormatSpeed, _Mapping]]] = ...) -> None: ...

class Gpu(_message.Message):
    __slots__ = ("name", "memory_bytes", "free_bytes", "driver", "compute_capability", "multiprocessors", "memory_bandwidth", "users", "kind")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    MULTIPROCESSORS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    name: str
    memory_bytes: int
    free_bytes: int
    driver: str
    compute_capability: str
    multiprocessors: int
    memory_bandwidth: float
    users: _containers.RepeatedCompositeFieldContainer[GpuUser]
    kind: str
    def __init__(self, name: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., driver: _Optional[str] = ..., compute_capability: _Optional[str] = ..., multiprocessors: _Optional[int] = ..., memory_bandwidth: _Optional[float] = ..., users: _Optional[_Iterable[_Union[GpuUser, _Mapping]]] = ..., kind: _Optional[str] = ...) -> None: ...

class GpuUser(_message.Message):
    __slots__ = ("pid", "name", "bytes")
    PID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    pid: int
    name: str
    bytes: int
    def __init__(self, pid: _Optional[int] = ..., name: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("memory_available_bytes", "gpus")
    MEMORY_AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    memory_available_bytes: int
    gpus: _containers.RepeatedCompositeFieldContainer[Gpu]
    def __init__(self, memory_available_bytes: _Optional[int] = ..., gpus: _Optional[_Iterable[_Union[Gpu, _Mapping]]] = ...) -> None: ...

class Described(_message.Message):
    __slots__ = ("request_id", "failure", "profile", "beside", "from_hub")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    BESIDE_FIELD_NUMBER: _ClassVar[int]
    FROM_HUB_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    failure: Failure
    profile: ModelProfile
    beside: _containers.RepeatedCompositeFieldContainer[ModelProfile]
    from_hub: bool
    def __init__(self, request_id: _Optional[str] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., profile: _Optional[_Union[ModelProfile, _Mapping]] = ..., beside: _Optional[_Iterable[_Union[ModelProfile, _Mapping]]] = ..., from_hub: _Optional[bool] = ...) -> None: ...

class ModelProfile(_message.Message):
    __slots__ = ("name", "fingerprint", "layers", "kv_groups", "attention_splits", "mlp_units", "vocabulary_units", "attention_query_bytes", "attention_kv_bytes", "mlp_unit_bytes", "vocabulary_unit_bytes", "cache_bytes_per_token", "fixed_bytes", "context_length", "family", "parameters", "matrices", "hidden", "expert_layers", "expert_count", "experts_per_token", "expert_bytes", "trunk_mlp_unit_bytes", "trunk_fixed_bytes", "host_fixed_bytes", "expert_weight_bytes", "chats", "windowed_bytes_per_token", "window", "adapter_elements", "layer_costs", "state_bytes", "sampling", "groups_per_shared_head", "shared_kv_bytes", "shared_cache_bytes_per_token", "further_streams", "position_bytes", "usual_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_GROUPS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_SPLITS_FIELD_NUMBER: _ClassVar[int]
    MLP_UNITS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_UNITS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_QUERY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    MLP_UNIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_UNIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FIXED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    MATRICES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    EXPERT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXPERT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRUNK_MLP_UNIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRUNK_FIXED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_FIXED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPERT_WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHATS_FIELD_NUMBER: _ClassVar[int]
    WINDOWED_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    LAYER_COSTS_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    GROUPS_PER_SHARED_HEAD_FIELD_NUMBER: _ClassVar[int]
    SHARED_KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_CACHE_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FURTHER_STREAMS_FIELD_NUMBER: _ClassVar[int]
    POSITION_BYTES_FIELD_NUMBER: _ClassVar[int]
    USUAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    layers: int
    kv_groups: int
    attention_splits: _containers.RepeatedScalarFieldContainer[int]
    mlp_units: int
    vocabulary_units: int
    attention_query_bytes: int
    attention_kv_bytes: int
    mlp_unit_bytes: int
    vocabulary_unit_bytes: int
    cache_bytes_per_token: int
    fixed_bytes: int
    context_length: int
    family: str
    parameters: int
    matrices: str
    hidden: int
    expert_layers: _containers.RepeatedScalarFieldContainer[int]
    expert_count: int
    experts_per_token: int
    expert_bytes: int
    trunk_mlp_unit_bytes: int
    trunk_fixed_bytes: int
    host_fixed_bytes: int
    expert_weight_bytes: int
    chats: bool
    windowed_bytes_per_token: int
    window: int
    adapter_elements: int
    layer_costs: _containers.RepeatedCompositeFieldContainer[LayerCosts]
    state_bytes: int
    sampling: Sampling
    groups_per_shared_head: int
    shared_kv_bytes: int
    shared_cache_bytes_per_token: int
    further_streams: int
    position_bytes: int
    usual_tokens: int
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., layers: _Optional[int] = ..., kv_groups: _Optional[int] = ..., attention_splits: _Optional[_Iterable[int]] = ..., mlp_units: _Optional[int] = ..., vocabulary_units: _Optional[int] = ..., attention_query_bytes: _Optional[int] = ..., attention_kv_bytes: _Optional[int] = ..., mlp_unit_bytes: _Optional[int] = ..., vocabulary_unit_bytes: _Optional[int] = ..., cache_bytes_per_token: _Optional[int] = ..., fixed_bytes: _Optional[int] = ..., context_length: _Optional[int] = ..., family: _Optional[str] = ..., parameters: _Optional[int] = ..., matrices: _Optional[str] = ..., hidden: _Optional[int] = ..., expert_layers: _Optional[_Iterable[int]] = ..., expert_count: _Optional[int] = ..., experts_per_token: _Optional[int] = ..., expert_bytes: _Optional[int] = ..., trunk_mlp_unit_bytes: _Optional[int] = ..., trunk_fixed_bytes: _Optional[int] = ..., host_fixed_bytes: _Optional[int] = ..., expert_weight_bytes: _Optional[int] = ..., chats: _Optional[bool] = ..., windowed_bytes_per_token: _Optional[int] = ..., window: _Optional[int] = ..., adapter_elements: _Optional[int] = ..., layer_costs: _Optional[_Iterable[_Union[LayerCosts, _Mapping]]] = ..., state_bytes: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., groups_per_shared_head: _Optional[int] = ..., shared_kv_bytes: _Optional[int] = ..., shared_cache_bytes_per_token: _Optional[int] = ..., further_streams: _Optional[int] = ..., position_bytes: _Optional[int] = ..., usual_tokens: _Optional[int] = ...) -> None: ...

class LayerCosts(_message.Message):
    __slots__ = ("layers", "attention_query_bytes", "attention_kv_bytes", "mlp_unit_bytes", "cache_bytes_per_token", "fixed_bytes", "trunk_mlp_unit_bytes", "windowed_bytes_per_token", "state_bytes", "shared_kv_bytes", "shared_cache_bytes_per_token", "follows")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_QUERY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    MLP_UNIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FIXED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRUNK_MLP_UNIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    WINDOWED_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_CACHE_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    layers: int
    attention_query_bytes: int
    attention_kv_bytes: int
    mlp_unit_bytes: int
    cache_bytes_per_token: int
    fixed_bytes: int
    trunk_mlp_unit_bytes: int
    windowed_bytes_per_token: int
    state_bytes: int
    shared_kv_bytes: int
    shared_cache_bytes_per_token: int
    follows: bool
    def __init__(self, layers: _Optional[int] = ..., attention_query_bytes: _Optional[int] = ..., attention_kv_bytes: _Optional[int] = ..., mlp_unit_bytes: _Optional[int] = ..., cache_bytes_per_token: _Optional[int] = ..., fixed_bytes: _Optional[int] = ..., trunk_mlp_unit_bytes: _Optional[int] = ..., windowed_bytes_per_token: _Optional[int] = ..., state_bytes: _Optional[int] = ..., shared_kv_bytes: _Optional[int] = ..., shared_cache_bytes_per_token: _Optional[int] = ..., follows: _Optional[bool] = ...) -> None: ...

class OrchestratorMessage(_message.Message):
    __slots__ = ("welcome", "describe", "rank", "generate", "cancel", "beat", "hold", "probe", "lend", "leave", "involved", "lease_order", "budget_order", "relay", "job")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    DESCRIBE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    LEND_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    INVOLVED_FIELD_NUMBER: _ClassVar[int]
    LEASE_ORDER_FIELD_NUMBER: _ClassVar[int]
    BUDGET_ORDER_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    describe: Describe
    rank: RankCommand
    generate: Generate
    cancel: Cancel
    beat: Empty
    hold: Hold
    probe: Probe
    lend: Lend
    leave: Empty
    involved: Involved
    lease_order: LeaseOrder
    budget_order: BudgetOrder
    relay: Relay
    job: JobOrder
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., describe: _Optional[_Union[Describe, _Mapping]] = ..., rank: _Optional[_Union[RankCommand, _Mapping]] = ..., generate: _Optional[_Union[Generate, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., beat: _Optional[_Union[Empty, _Mapping]] = ..., hold: _Optional[_Union[Hold, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., lend: _Optional[_Union[Lend, _Mapping]] = ..., leave: _Optional[_Union[Empty, _Mapping]] = ..., involved: _Optional[_Union[Involved, _Mapping]] = ..., lease_order: _Optional[_Union[LeaseOrder, _Mapping]] = ..., budget_order: _Optional[_Union[BudgetOrder, _Mapping]] = ..., relay: _Optional[_Union[Relay, _Mapping]] = ..., job: _Optional[_Union[JobOrder, _Mapping]] = ...) -> None: ...

class JobOrder(_message.Message):
    __slots__ = ("job", "epoch", "member", "start", "peers", "end", "forget")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: int
    member: int
    start: JobStart
    peers: JobPeers
    end: Empty
    forget: Empty
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[int] = ..., member: _Optional[int] = ..., start: _Optional[_Union[JobStart, _Mapping]] = ..., peers: _Optional[_Union[JobPeers, _Mapping]] = ..., end: _Optional[_Union[Empty, _Mapping]] = ..., forget: _Optional[_Union[Empty, _Mapping]] = ...) -> None: ...

class JobStart(_message.Message):
    __slots__ = ("name", "mode", "model", "members", "secret", "tls", "ticket", "computes", "loan")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_FIELD_NUMBER: _ClassVar[int]
    LOAN_FIELD_NUMBER: _ClassVar[int]
    name: str
    mode: str
    model: str
    members: int
    secret: bytes
    tls: Credentials
    ticket: str
    computes: bool
    loan: Loan
    def __init__(self, name: _Optional[str] = ..., mode: _Optional[str] = ..., model: _Optional[str] = ..., members: _Optional[int] = ..., secret: _Optional[bytes] = ..., tls: _Optional[_Union[Credentials, _Mapping]] = ..., ticket: _Optional[str] = ..., computes: _Optional[bool] = ..., loan: _Optional[_Union[Loan, _Mapping]] = ...) -> None: ...

class JobPeers(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[JobPeer]
    def __init__(self, peers: _Optional[_Iterable[_Union[JobPeer, _Mapping]]] = ...) -> None: ...

class JobPeer(_message.Message):
    __slots__ = ("member", "node", "address", "left_out", "memory_bytes", "speed", "owns")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    OWNS_FIELD_NUMBER: _ClassVar[int]
    member: int
    node: str
    address: str
    left_out: str
    memory_bytes: int
    speed: float
    owns: bool
    def __init__(self, member: _Optional[int] = ..., node: _Optional[str] = ..., address: _Optional[str] = ..., left_out: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., speed: _Optional[float] = ..., owns: _Optional[bool] = ...) -> None: ...

class JobEvent(_message.Message):
    __slots__ = ("job", "epoch", "member", "waits", "listening", "progress", "says", "failed", "died", "done", "broke")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    LISTENING_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SAYS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    DIED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    BROKE_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: int
    member: int
    waits: str
    listening: str
    progress: JobProgress
    says: str
    failed: str
    died: str
    done: str
    broke: str
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[int] = ..., member: _Optional[int] = ..., waits: _Optional[str] = ..., listening: _Optional[str] = ..., progress: _Optional[_Union[JobProgress, _Mapping]] = ..., says: _Optional[str] = ..., failed: _Optional[str] = ..., died: _Optional[str] = ..., done: _Optional[str] = ..., broke: _Optional[str] = ...) -> None: ...

class JobProgress(_message.Message):
    __slots__ = ("step", "steps", "loss", "rate", "held_out", "tokens_per_s", "peak_bytes")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    HELD_OUT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    step: int
    steps: int
    loss: float
    rate: float
    held_out: float
    tokens_per_s: float
    peak_bytes: int
    def __init__(self, step: _Optional[int] = ..., steps: _Optional[int] = ..., loss: _Optional[float] = ..., rate: _Optional[float] = ..., held_out: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., peak_bytes: _Optional[int] = ...) -> None: ...

class Involved(_message.Message):
    __slots__ = ("name", "session", "rank", "ended")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    name: str
    session: str
    rank: int
    ended: bool
    def __init__(self, name: _Optional[str] = ..., session: _Optional[str] = ..., rank: _Optional[int] = ..., ended: _Optional[bool] = ...) -> None: ...

class Relay(_message.Message):
    __slots__ = ("id", "target")
    ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    id: str
    target: str
    def __init__(self, id: _Optional[str] = ..., target: _Optional[str] = ...) -> None: ...

class Relayed(_message.Message):
    __slots__ = ("id", "listening", "failure")
    ID_FIELD_NUMBER: _ClassVar[int]
    LISTENING_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    id: str
    listening: str
    failure: str
    def __init__(self, id: _Optional[str] = ..., listening: _Optional[str] = ..., failure: _Optional[str] = ...) -> None: ...

class LeaseOrder(_message.Message):
    __slots__ = ("id", "give", "device", "holder", "reason", "seconds")
    ID_FIELD_NUMBER: _ClassVar[int]
    GIVE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    id: str
    give: bool
    device: str
    holder: str
    reason: str
    seconds: float
    def __init__(self, id: _Optional[str] = ..., give: _Optional[bool] = ..., device: _Optional[str] = ..., holder: _Optional[str] = ..., reason: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class BudgetOrder(_message.Message):
    __slots__ = ("id", "memory_bytes", "gpu_bytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_BYTES_FIELD_NUMBER: _ClassVar[int]
    id: str
    memory_bytes: int
    gpu_bytes: int
    def __init__(self, id: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., gpu_bytes: _Optional[int] = ...) -> None: ...

class Lend(_message.Message):
    __slots__ = ("id", "source", "fingerprint", "members", "secret", "tls")
    ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    id: str
    source: str
    fingerprint: str
    members: int
    secret: bytes
    tls: Credentials
    def __init__(self, id: _Optional[str] = ..., source: _Optional[str] = ..., fingerprint: _Optional[str] = ..., members: _Optional[int] = ..., secret: _Optional[bytes] = ..., tls: _Optional[_Union[Credentials, _Mapping]] = ...) -> None: ...

class Lent(_message.Message):
    __slots__ = ("id", "listening", "files", "failure")
    ID_FIELD_NUMBER: _ClassVar[int]
    LISTENING_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    id: str
    listening: str
    files: str
    failure: str
    def __init__(self, id: _Optional[str] = ..., listening: _Optional[str] = ..., files: _Optional[str] = ..., failure: _Optional[str] = ...) -> None: ...

class Loan(_message.Message):
    __slots__ = ("id", "node", "address", "files", "member", "members", "secret", "tls")
    ID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    id: str
    node: str
    address: str
    files: str
    member: int
    members: int
    secret: bytes
    tls: Credentials
    def __init__(self, id: _Optional[str] = ..., node: _Optional[str] = ..., address: _Optional[str] = ..., files: _Optional[str] = ..., member: _Optional[int] = ..., members: _Optional[int] = ..., secret: _Optional[bytes] = ..., tls: _Optional[_Union[Credentials, _Mapping]] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("id", "address", "secret", "tls", "seconds")
    ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    id: str
    address: str
    secret: bytes
    tls: Credentials
    seconds: float
    def __init__(self, id: _Optional[str] = ..., address: _Optional[str] = ..., secret: _Optional[bytes] = ..., tls: _Optional[_Union[Credentials, _Mapping]] = ..., seconds: _Optional[float] = ...) -> None: ...

class Probed(_message.Message):
    __slots__ = ("id", "listening", "latency_s", "bandwidth", "failure")
    ID_FIELD_NUMBER: _ClassVar[int]
    LISTENING_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    id: str
    listening: str
    latency_s: float
    bandwidth: float
    failure: str
    def __init__(self, id: _Optional[str] = ..., listening: _Optional[str] = ..., latency_s: _Optional[float] = ..., bandwidth: _Optional[float] = ..., failure: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("node_id", "heartbeat_s", "silence_s", "key", "api_url", "api_trust", "takes_several")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    SILENCE_S_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    API_URL_FIELD_NUMBER: _ClassVar[int]
    API_TRUST_FIELD_NUMBER: _ClassVar[int]
    TAKES_SEVERAL_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    heartbeat_s: float
    silence_s: float
    key: str
    api_url: str
    api_trust: bytes
    takes_several: bool
    def __init__(self, node_id: _Optional[str] = ..., heartbeat_s: _Optional[float] = ..., silence_s: _Optional[float] = ..., key: _Optional[str] = ..., api_url: _Optional[str] = ..., api_trust: _Optional[bytes] = ..., takes_several: _Optional[bool] = ...) -> None: ...

class Describe(_message.Message):
    __slots__ = ("request_id", "model", "tokens_of", "only_here", "in_part")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_OF_FIELD_NUMBER: _ClassVar[int]
    ONLY_HERE_FIELD_NUMBER: _ClassVar[int]
    IN_PART_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: ModelSpec
    tokens_of: str
    only_here: bool
    in_part: bool
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[_Union[ModelSpec, _Mapping]] = ..., tokens_of: _Optional[str] = ..., only_here: _Optional[bool] = ..., in_part: _Optional[bool] = ...) -> None: ...

class ModelSpec(_message.Message):
    __slots__ = ("source", "quantisation", "block", "exact", "beside", "cache_format", "ahead", "config_json")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    QUANTISATION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    BESIDE_FIELD_NUMBER: _ClassVar[int]
    CACHE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    source: str
    quantisation: str
    block: int
    exact: bool
    beside: _containers.RepeatedScalarFieldContainer[str]
    cache_format: str
    ahead: bool
    config_json: str
    def __init__(self, source: _Optional[str] = ..., quantisation: _Optional[str] = ..., block: _Optional[int] = ..., exact: _Optional[bool] = ..., beside: _Optional[_Iterable[str]] = ..., cache_format: _Optional[str] = ..., ahead: _Optional[bool] = ..., config_json: _Optional[str] = ...) -> None: ...

class RankCommand(_message.Message):
    __slots__ = ("session", "epoch", "rank", "assign", "peers", "release", "placement", "host", "adapter")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ASSIGN_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    session: str
    epoch: int
    rank: int
    assign: Assignment
    peers: Peers
    release: Release
    placement: Placement
    host: HostedExperts
    adapter: AdapterOrder
    def __init__(self, session: _Optional[str] = ..., epoch: _Optional[int] = ..., rank: _Optional[int] = ..., assign: _Optional[_Union[Assignment, _Mapping]] = ..., peers: _Optional[_Union[Peers, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., placement: _Optional[_Union[Placement, _Mapping]] = ..., host: _Optional[_Union[HostedExperts, _Mapping]] = ..., adapter: _Optional[_Union[AdapterOrder, _Mapping]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("fingerprint", "source")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    source: str
    def __init__(self, fingerprint: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class AdapterOrder(_message.Message):
    __slots__ = ("id", "adapter", "pin", "unpin")
    ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    id: str
    adapter: Adapter
    pin: bool
    unpin: bool
    def __init__(self, id: _Optional[str] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ..., pin: _Optional[bool] = ..., unpin: _Optional[bool] = ...) -> None: ...

class AdapterEvent(_message.Message):
    __slots__ = ("id", "fingerprint", "rank", "bytes", "failure", "load_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    id: str
    fingerprint: str
    rank: int
    bytes: int
    failure: Failure
    load_s: float
    def __init__(self, id: _Optional[str] = ..., fingerprint: _Optional[str] = ..., rank: _Optional[int] = ..., bytes: _Optional[int] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., load_s: _Optional[float] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Range(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class Share(_message.Message):
    __slots__ = ("attention_split", "attention", "mlp", "vocabulary", "quantisation", "layers")
    ATTENTION_SPLIT_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    MLP_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    QUANTISATION_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    attention_split: int
    attention: Range
    mlp: Range
    vocabulary: Range
    quantisation: str
    layers: Range
    def __init__(self, attention_split: _Optional[int] = ..., attention: _Optional[_Union[Range, _Mapping]] = ..., mlp: _Optional[_Union[Range, _Mapping]] = ..., vocabulary: _Optional[_Union[Range, _Mapping]] = ..., quantisation: _Optional[str] = ..., layers: _Optional[_Union[Range, _Mapping]] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("model", "fingerprint", "size", "shares", "context", "engine", "threads", "secret", "tls", "plain", "wire", "hosts", "expert_slices", "group", "engine_options", "cache_blocks", "cache_block_tokens", "sequences", "draft", "far_blocks", "far_blocks_on_disk", "cache_holders", "holder_bytes", "windowed_blocks", "window", "keep_prefixes", "loan", "adapters", "adapter_rank", "expert_engine", "embeddings", "one_wave", "snapshots")
    class EngineOptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_SLICES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ENGINE_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    CACHE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHE_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    FAR_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FAR_BLOCKS_ON_DISK_FIELD_NUMBER: _ClassVar[int]
    CACHE_HOLDERS_FIELD_NUMBER: _ClassVar[int]
    HOLDER_BYTES_FIELD_NUMBER: _ClassVar[int]
    WINDOWED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    KEEP_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    LOAN_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_RANK_FIELD_NUMBER: _ClassVar[int]
    EXPERT_ENGINE_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    ONE_WAVE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    model: ModelSpec
    fingerprint: str
    size: int
    shares: _containers.RepeatedCompositeFieldContainer[Share]
    context: int
    engine: str
    threads: int
    secret: bytes
    tls: Credentials
    plain: Empty
    wire: str
    hosts: _containers.RepeatedCompositeFieldContainer[HostedExperts]
    expert_slices: int
    group: Group
    engine_options: _containers.ScalarMap[str, str]
    cache_blocks: int
    cache_block_tokens: int
    sequences: int
    draft: Assignment
    far_blocks: int
    far_blocks_on_disk: int
    cache_holders: int
    holder_bytes: int
    windowed_blocks: int
    window: int
    keep_prefixes: bool
    loan: Loan
    adapters: int
    adapter_rank: int
    expert_engine: str
    embeddings: str
    one_wave: bool
    snapshots: int
    def __init__(self, model: _Optional[_Union[ModelSpec, _Mapping]] = ..., fingerprint: _Optional[str] = ..., size: _Optional[int] = ..., shares: _Optional[_Iterable[_Union[Share, _Mapping]]] = ..., context: _Optional[int] = ..., engine: _Optional[str] = ..., threads: _Optional[int] = ..., secret: _Optional[bytes] = ..., tls: _Optional[_Union[Credentials, _Mapping]] = ..., plain: _Optional[_Union[Empty, _Mapping]] = ..., wire: _Optional[str] = ..., hosts: _Optional[_Iterable[_Union[HostedExperts, _Mapping]]] = ..., expert_slices: _Optional[int] = ..., group: _Optional[_Union[Group, _Mapping]] = ..., engine_options: _Optional[_Mapping[str, str]] = ..., cache_blocks: _Optional[int] = ..., cache_block_tokens: _Optional[int] = ..., sequences: _Optional[int] = ..., draft: _Optional[_Union[Assignment, _Mapping]] = ..., far_blocks: _Optional[int] = ..., far_blocks_on_disk: _Optional[int] = ..., cache_holders: _Optional[int] = ..., holder_bytes: _Optional[int] = ..., windowed_blocks: _Optional[int] = ..., window: _Optional[int] = ..., keep_prefixes: _Optional[bool] = ..., loan: _Optional[_Union[Loan, _Mapping]] = ..., adapters: _Optional[int] = ..., adapter_rank: _Optional[int] = ..., expert_engine: _Optional[str] = ..., embeddings: _Optional[str] = ..., one_wave: _Optional[bool] = ..., snapshots: _Optional[int] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("host", "member", "slices", "ranks", "secret", "tls")
    HOST_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    host: int
    member: int
    slices: _containers.RepeatedScalarFieldContainer[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    secret: bytes
    tls: Credentials
    def __init__(self, host: _Optional[int] = ..., member: _Optional[int] = ..., slices: _Optional[_Iterable[int]] = ..., ranks: _Optional[_Iterable[int]] = ..., secret: _Optional[bytes] = ..., tls: _Optional[_Union[Credentials, _Mapping]] = ...) -> None: ...

class ExpertSet(_message.Message):
    __slots__ = ("layer", "indices")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    layer: int
    indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer: _Optional[int] = ..., indices: _Optional[_Iterable[int]] = ...) -> None: ...

class HostedExperts(_message.Message):
    __slots__ = ("sets", "digests")
    SETS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    sets: _containers.RepeatedCompositeFieldContainer[ExpertSet]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, sets: _Optional[_Iterable[_Union[ExpertSet, _Mapping]]] = ..., digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("version", "hosts", "addresses", "alive")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    version: int
    hosts: _containers.RepeatedCompositeFieldContainer[HostedExperts]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    alive: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, version: _Optional[int] = ..., hosts: _Optional[_Iterable[_Union[HostedExperts, _Mapping]]] = ..., addresses: _Optional[_Iterable[str]] = ..., alive: _Optional[_Iterable[bool]] = ...) -> None: ...

class Credentials(_message.Message):
    __slots__ = ("authority", "certificate", "key")
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    authority: bytes
    certificate: bytes
    key: bytes
    def __init__(self, authority: _Optional[bytes] = ..., certificate: _Optional[bytes] = ..., key: _Optional[bytes] = ...) -> None: ...

class Peers(_message.Message):
    __slots__ = ("addresses", "group")
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    group: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, addresses: _Optional[_Iterable[str]] = ..., group: _Optional[_Iterable[str]] = ...) -> None: ...

class RankEvent(_message.Message):
    __slots__ = ("session", "epoch", "rank", "listening", "loading", "ready", "failed", "timing", "released", "hosted", "experts", "starved", "activity", "adapter", "steps")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    LISTENING_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    HOSTED_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    STARVED_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    session: str
    epoch: int
    rank: int
    listening: str
    loading: Loading
    ready: Ready
    failed: Failure
    timing: Timing
    released: Empty
    hosted: HostedExperts
    experts: ExpertReport
    starved: Starved
    activity: Activity
    adapter: AdapterEvent
    steps: Steps
    def __init__(self, session: _Optional[str] = ..., epoch: _Optional[int] = ..., rank: _Optional[int] = ..., listening: _Optional[str] = ..., loading: _Optional[_Union[Loading, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., failed: _Optional[_Union[Failure, _Mapping]] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., released: _Optional[_Union[Empty, _Mapping]] = ..., hosted: _Optional[_Union[HostedExperts, _Mapping]] = ..., experts: _Optional[_Union[ExpertReport, _Mapping]] = ..., starved: _Optional[_Union[Starved, _Mapping]] = ..., activity: _Optional[_Union[Activity, _Mapping]] = ..., adapter: _Optional[_Union[AdapterEvent, _Mapping]] = ..., steps: _Optional[_Union[Steps, _Mapping]] = ...) -> None: ...

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Loading(_message.Message):
    __slots__ = ("done_bytes", "total_bytes")
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    done_bytes: int
    total_bytes: int
    def __init__(self, done_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("share_bytes", "rss_bytes", "load_s", "pid")
    SHARE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    share_bytes: int
    rss_bytes: int
    load_s: float
    pid: int
    def __init__(self, share_bytes: _Optional[int] = ..., rss_bytes: _Optional[int] = ..., load_s: _Optional[float] = ..., pid: _Optional[int] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("tokens", "compute_s", "wire_s", "wait_s", "collectives", "peak_rss_bytes", "step_ms", "step_compute_ms", "step_wire_ms", "step_wait_ms", "steps")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    WIRE_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVES_FIELD_NUMBER: _ClassVar[int]
    PEAK_RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_WIRE_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    compute_s: float
    wire_s: float
    wait_s: float
    collectives: int
    peak_rss_bytes: int
    step_ms: _containers.RepeatedScalarFieldContainer[float]
    step_compute_ms: _containers.RepeatedScalarFieldContainer[float]
    step_wire_ms: _containers.RepeatedScalarFieldContainer[float]
    step_wait_ms: _containers.RepeatedScalarFieldContainer[float]
    steps: int
    def __init__(self, tokens: _Optional[int] = ..., compute_s: _Optional[float] = ..., wire_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., collectives: _Optional[int] = ..., peak_rss_bytes: _Optional[int] = ..., step_ms: _Optional[_Iterable[float]] = ..., step_compute_ms: _Optional[_Iterable[float]] = ..., step_wire_ms: _Optional[_Iterable[float]] = ..., step_wait_ms: _Optional[_Iterable[float]] = ..., steps: _Optional[int] = ...) -> None: ...

class Steps(_message.Message):
    __slots__ = ("first", "compute_ms", "wire_ms", "wait_ms")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    WIRE_MS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    first: int
    compute_ms: _containers.RepeatedScalarFieldContainer[float]
    wire_ms: _containers.RepeatedScalarFieldContainer[float]
    wait_ms: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, first: _Optional[int] = ..., compute_ms: _Optional[_Iterable[float]] = ..., wire_ms: _Optional[_Iterable[float]] = ..., wait_ms: _Optional[_Iterable[float]] = ...) -> None: ...

class Activity(_message.Message):
    __slots__ = ("active", "waiting", "blocks", "blocks_used", "blocks_kept", "block_tokens", "prompt_tokens", "cached_tokens", "generated_tokens", "tried_drafts", "accepted_drafts", "far_blocks", "far_blocks_used", "trouble", "windowed_blocks", "windowed_blocks_used", "blocks_on_disk", "far_tiers", "adapters", "adapter_loads")
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_KEPT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRIED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    FAR_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FAR_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    WINDOWED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WINDOWED_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_ON_DISK_FIELD_NUMBER: _ClassVar[int]
    FAR_TIERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LOADS_FIELD_NUMBER: _ClassVar[int]
    active: int
    waiting: int
    blocks: int
    blocks_used: int
    blocks_kept: int
    block_tokens: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    tried_drafts: int
    accepted_drafts: int
    far_blocks: int
    far_blocks_used: int
    trouble: str
    windowed_blocks: int
    windowed_blocks_used: int
    blocks_on_disk: int
    far_tiers: _containers.RepeatedCompositeFieldContainer[FarTier]
    adapters: _containers.RepeatedScalarFieldContainer[str]
    adapter_loads: int
    def __init__(self, active: _Optional[int] = ..., waiting: _Optional[int] = ..., blocks: _Optional[int] = ..., blocks_used: _Optional[int] = ..., blocks_kept: _Optional[int] = ..., block_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., tried_drafts: _Optional[int] = ..., accepted_drafts: _Optional[int] = ..., far_blocks: _Optional[int] = ..., far_blocks_used: _Optional[int] = ..., trouble: _Optional[str] = ..., windowed_blocks: _Optional[int] = ..., windowed_blocks_used: _Optional[int] = ..., blocks_on_disk: _Optional[int] = ..., far_tiers: _Optional[_Iterable[_Union[FarTier, _Mapping]]] = ..., adapters: _Optional[_Iterable[str]] = ..., adapter_loads: _Optional[int] = ...) -> None: ...

class FarTier(_message.Message):
    __slots__ = ("place", "blocks", "blocks_used", "block_ms")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_MS_FIELD_NUMBER: _ClassVar[int]
    place: str
    blocks: int
    blocks_used: int
    block_ms: float
    def __init__(self, place: _Optional[str] = ..., blocks: _Optional[int] = ..., blocks_used: _Optional[int] = ..., block_ms: _Optional[float] = ...) -> None: ...

class ExpertReport(_message.Message):
    __slots__ = ("loads", "hosts", "bytes_out", "bytes_in", "version")
    LOADS_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    loads: _containers.RepeatedCompositeFieldContainer[ExpertLoad]
    hosts: _containers.RepeatedCompositeFieldContainer[HostReport]
    bytes_out: int
    bytes_in: int
    version: int
    def __init__(self, loads: _Optional[_Iterable[_Union[ExpertLoad, _Mapping]]] = ..., hosts: _Optional[_Iterable[_Union[HostReport, _Mapping]]] = ..., bytes_out: _Optional[int] = ..., bytes_in: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class ExpertLoad(_message.Message):
    __slots__ = ("layer", "rows")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer: _Optional[int] = ..., rows: _Optional[_Iterable[int]] = ...) -> None: ...

class HostReport(_message.Message):
    __slots__ = ("host", "lost", "rows", "busy_s", "wait_s", "round_trip_s", "stalls_s", "given_up", "calls", "computed_s")
    HOST_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    STALLS_S_FIELD_NUMBER: _ClassVar[int]
    GIVEN_UP_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_S_FIELD_NUMBER: _ClassVar[int]
    host: int
    lost: str
    rows: int
    busy_s: float
    wait_s: float
    round_trip_s: float
    stalls_s: _containers.RepeatedScalarFieldContainer[float]
    given_up: bool
    calls: int
    computed_s: float
    def __init__(self, host: _Optional[int] = ..., lost: _Optional[str] = ..., rows: _Optional[int] = ..., busy_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., round_trip_s: _Optional[float] = ..., stalls_s: _Optional[_Iterable[float]] = ..., given_up: _Optional[bool] = ..., calls: _Optional[int] = ..., computed_s: _Optional[float] = ...) -> None: ...

class Starved(_message.Message):
    __slots__ = ("layer", "index", "version")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    layer: int
    index: int
    version: int
    def __init__(self, layer: _Optional[int] = ..., index: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "message", "lost_rank", "param", "found_by")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LOST_RANK_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    FOUND_BY_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    lost_rank: int
    param: str
    found_by: int
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., lost_rank: _Optional[int] = ..., param: _Optional[str] = ..., found_by: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "logit_bias", "top_logprobs", "logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: _containers.ScalarMap[int, float]
    top_logprobs: int
    logprobs: bool
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., top_logprobs: _Optional[int] = ..., logprobs: _Optional[bool] = ...) -> None: ...

class Generate(_message.Message):
    __slots__ = ("request_id", "session", "messages_json", "prompt", "prompt_tokens", "sampling", "max_tokens", "stop", "ignore_eos", "echo", "without_drafts", "usual_tokens", "written", "constraint", "tools_json", "tool_choice", "one_call", "strict_tools", "reasoning_effort", "template_json", "only_prompt", "adapter", "name", "embed", "priority", "asked_at")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    USUAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    ONE_CALL_FIELD_NUMBER: _ClassVar[int]
    STRICT_TOOLS_FIELD_NUMBER: _ClassVar[int]
    REASONING_EFFORT_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_JSON_FIELD_NUMBER: _ClassVar[int]
    ONLY_PROMPT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    EMBED_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ASKED_AT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    session: str
    messages_json: str
    prompt: str
    prompt_tokens: TokenIds
    sampling: Sampling
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos: bool
    echo: bool
    without_drafts: bool
    usual_tokens: int
    written: _containers.RepeatedScalarFieldContainer[int]
    constraint: Constraint
    tools_json: str
    tool_choice: str
    one_call: bool
    strict_tools: _containers.RepeatedScalarFieldContainer[str]
    reasoning_effort: str
    template_json: str
    only_prompt: bool
    adapter: Adapter
    name: str
    embed: bool
    priority: int
    asked_at: str
    def __init__(self, request_id: _Optional[str] = ..., session: _Optional[str] = ..., messages_json: _Optional[str] = ..., prompt: _Optional[str] = ..., prompt_tokens: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., ignore_eos: _Optional[bool] = ..., echo: _Optional[bool] = ..., without_drafts: _Optional[bool] = ..., usual_tokens: _Optional[int] = ..., written: _Optional[_Iterable[int]] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., tools_json: _Optional[str] = ..., tool_choice: _Optional[str] = ..., one_call: _Optional[bool] = ..., strict_tools: _Optional[_Iterable[str]] = ..., reasoning_effort: _Optional[str] = ..., template_json: _Optional[str] = ..., only_prompt: _Optional[bool] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ..., name: _Optional[str] = ..., embed: _Optional[bool] = ..., priority: _Optional[int] = ..., asked_at: _Optional[str] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_schema", "regex", "grammar", "param", "thoughts", "around")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    THOUGHTS_FIELD_NUMBER: _ClassVar[int]
    AROUND_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    grammar: str
    param: str
    thoughts: Thoughts
    around: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., param: _Optional[str] = ..., thoughts: _Optional[_Union[Thoughts, _Mapping]] = ..., around: _Optional[str] = ...) -> None: ...

class Thoughts(_message.Message):
    __slots__ = ("begin", "end", "begun")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: _containers.RepeatedScalarFieldContainer[int]
    begun: bool
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[_Iterable[int]] = ..., begun: _Optional[bool] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class Hold(_message.Message):
    __slots__ = ("request_id", "held")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    held: bool
    def __init__(self, request_id: _Optional[str] = ..., held: _Optional[bool] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("id", "logprob", "text", "raw")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    text: str
    raw: bytes
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ..., text: _Optional[str] = ..., raw: _Optional[bytes] = ...) -> None: ...

class LogprobRow(_message.Message):
    __slots__ = ("chosen", "top")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    chosen: TokenLogprob
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, chosen: _Optional[_Union[TokenLogprob, _Mapping]] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class CallPiece(_message.Message):
    __slots__ = ("index", "id", "name", "arguments")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    arguments: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("request_id", "text", "ids", "logprobs", "finish", "failure", "prompt_tokens", "completion_tokens", "prefill_s", "cached_tokens", "accepted_drafts", "token_s", "reasoning", "calls", "stopped_by", "embedding")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    STOPPED_BY_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[LogprobRow]
    finish: str
    failure: Failure
    prompt_tokens: int
    completion_tokens: int
    prefill_s: float
    cached_tokens: int
    accepted_drafts: int
    token_s: float
    reasoning: str
    calls: _containers.RepeatedCompositeFieldContainer[CallPiece]
    stopped_by: str
    embedding: bytes
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[LogprobRow, _Mapping]]] = ..., finish: _Optional[str] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., prefill_s: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., accepted_drafts: _Optional[int] = ..., token_s: _Optional[float] = ..., reasoning: _Optional[str] = ..., calls: _Optional[_Iterable[_Union[CallPiece, _Mapping]]] = ..., stopped_by: _Optional[str] = ..., embedding: _Optional[bytes] = ...) -> None: ...

/* The NCCL ABI over Motley's transport: what a program that was linked or dlopened against NCCL calls.
 *
 * This file knows the ABI and nothing of networks. It checks arguments, keeps communicators' ranks and sizes, queues the
 * calls of a group, and hands rows of calls to the Python process it is loaded in (motley.plugins.nccl.binding), which
 * registers what executes them. Names, values and layouts are those of NCCL's public API, version 2.28: numbers are
 * written out here, as no NCCL need be installed to build this.
 *
 * Structures marked SHARED are mirrored in binding.py; motleyNcclSizes lets it compare.
 */
#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#define VERSION 22807 /* of the API: major * 10000 + minor * 100 + patch; 2.28 is the first with AlltoAll and Gather */
#define MESSAGE 512

typedef enum {
    ncclSuccess, ncclUnhandledCudaError, ncclSystemError, ncclInternalError, ncclInvalidArgument, ncclInvalidUsage,
    ncclRemoteError, ncclInProgress
} ncclResult_t;
/* int8 uint8 int32 uint32 int64 uint64 float16 float32 float64 bfloat16 float8e4m3 float8e5m2 */
static const size_t ITEM_SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
enum { DATA_TYPES = sizeof ITEM_SIZES / sizeof *ITEM_SIZES };
enum { sum, prod, max, min, avg, REDUCTIONS };
enum { NO_COLOR = -1 };

typedef struct { char internal[128]; } ncclUniqueId;
typedef void *cudaStream_t;

/* SHARED. A communicator. Its memory is never given back, so that a handle used after its end is told from a good one. */
typedef struct ncclComm {
    int32_t alive, rank, size, device;
    int32_t asyncError; /* an ncclResult_t; written by Python when a call fails after it has returned */
    char asyncMessage[MESSAGE];
    ncclUniqueId id;    /* of one that is being made */
} *ncclComm_t;

/* SHARED: the numbers are binding.Kind's. */
enum { ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL, GATHER, SCATTER, SEND, RECV, INIT, SPLIT };

/* SHARED. What is to be done, on which communicator; of INIT: the new one, of SPLIT: the one to split. */
typedef struct {
    int32_t kind, dataType, op;
    int32_t peer; /* or root, or color */
    uint64_t count;
    const void *send;
    void *recv;
    cudaStream_t stream;
    ncclComm_t comm, child;
    int32_t key, unused;
} Call;

/* SHARED. Each returns an ncclResult_t, and if that is not ncclSuccess writes up to MESSAGE bytes of text. */
typedef struct {
    int (*uniqueId)(char *id, char *message);
    int (*run)(const Call *calls, size_t count, char *message);
    int (*end)(ncclComm_t comm, int aborts, char *message);
} Callbacks;

static Callbacks callbacks;
static _Thread_local char lastError[MESSAGE];
/* A group belongs to the thread that starts it. */
static _Thread_local int groupDepth;
static _Thread_local ncclResult_t groupError;
static _Thread_local Call *queue;
static _Thread_local size_t queued, room;

static ncclResult_t fail(ncclResult_t code, const char *function, const char *why) {
    snprintf(lastError, sizeof lastError, "%s: %s", function, why);
    if (groupDepth && !groupError) groupError = code; /* a group with a wrong call runs none of its calls */
    return code;
}

static int isMissing(void) { return !callbacks.run; }
static const char MISSING[] = "nothing of Motley runs in this process; call motley.plugins.nccl.install() first";

EXPORT void motleyNcclRegister(const Callbacks *given) {
    static const Callbacks nothing;
    callbacks = given ? *given : nothing;
}

EXPORT void motleyNcclSizes(size_t *comm, size_t *call) {
    *comm = sizeof(struct ncclComm);
    *call = sizeof(Call);
}

/* A communicator that Python knows how to serve; NULL if there is no memory. */
EXPORT ncclComm_t motleyNcclNew(int rank, int size, int device) {
    ncclComm_t comm = calloc(1, sizeof *comm);
    if (!comm) return NULL;
    comm->alive = 1;
    comm->rank = rank;
    comm->size = size;
    comm->device = device;
    return comm;
}

/* Calls have failed: the communicators that they were to make are none. */
static void forget(const Call *calls, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (calls[i].kind == INIT) calls[i].comm->alive = 0;
        if (calls[i].child) calls[i].child->alive = 0;
    }
}

static ncclResult_t run(const Call *calls, size_t count) {
    ncclResult_t result;
    lastError[0] = 0;
    if (isMissing())
        result = fail(ncclInvalidUsage, "NCCL", MISSING);
    else
        result = (ncclResult_t)callbacks.run(calls, count, lastError);
    if (result) forget(calls, count);
    return result;
}

/* Run a call, or keep it for the end of the group. */
static ncclResult_t submit(Call call, const char *function) {
    if (!groupDepth) return run(&call, 1);
    if (queued == room) {
        size_t more = room ? 2 * room : 16;
        Call *grown = realloc(queue, more * sizeof *queue);
        if (!grown) return fail(ncclSystemError, function, "no memory for the calls of this group");
        queue = grown;
        room = more;
    }
    queue[queued++] = call;
    return ncclSuccess;
}

static ncclResult_t check(ncclComm_t comm, const char *function) {
    if (!comm || comm->alive != 1) return fail(ncclInvalidArgument, function, "this is no live communicator");
    return ncclSuccess;
}

/* All collectives and messages go through here. `gives`, `takes`: whether this rank's buffers are used;
   `parts`: how many times `count` the larger one holds. */
static ncclResult_t communicate(Call call, int gives, int takes, int parts, const char *function) {
    char why[120];
    ncclResult_t result = check(call.comm, function);
    if (result) return result;
    if (call.dataType < 0 || call.dataType >= DATA_TYPES) {
        snprintf(why, sizeof why, "%d is no data type; they are 0 to %d", call.dataType, DATA_TYPES - 1);
        return fail(ncclInvalidArgument, function, why);
    }
    if (call.op < 0 || call.op >= REDUCTIONS) {
        snprintf(why, sizeof why, "%d is no reduction; sum, prod, max, min and avg are 0 to 4, own ones are not supported",
                 call.op);
        return fail(ncclInvalidArgument, function, why);
    }
    if (call.peer < 0 || call.peer >= call.comm->size) {
        snprintf(why, sizeof why, "%d is no rank of a communicator of %d", call.peer, call.comm->size);
        return fail(ncclInvalidArgument, function, why);
    }
    if (call.count > (uint64_t)PTRDIFF_MAX / ITEM_SIZES[call.dataType] / (unsigned)parts)
        return fail(ncclInvalidArgument, function, "the count is larger than memory can be");
    if (!call.count) return ncclSuccess; /* as on every rank */
    if ((gives && !call.send) || (takes && !call.recv))
        return fail(ncclInvalidArgument, function, "a buffer is NULL that this rank has to give");
    return submit(call, function);
}

/* -- the process ------------------------------------------------------------------------------------------------- */

EXPORT ncclResult_t ncclGetVersion(int *version) {
    if (!version) return fail(ncclInvalidArgument, __func__, "the version has nowhere to go: NULL");
    *version = VERSION;
    return ncclSuccess;
}

EXPORT const char *ncclGetErrorString(ncclResult_t result) {
    switch (result) {
        case ncclSuccess: return "no error";
        case ncclUnhandledCudaError: return "unhandled CUDA error (ncclGetLastError tells more)";
        case ncclSystemError: return "system error (ncclGetLastError tells more)";
        case ncclInternalError: return "internal error: a bug in Motley (ncclGetLastError tells more)";
        case ncclInvalidArgument: return "invalid argument (ncclGetLastError tells more)";
        case ncclInvalidUsage: return "invalid usage (ncclGetLastError tells more)";
        case ncclRemoteError: return "a rank is lost or broke the protocol (ncclGetLastError tells more)";
        case ncclInProgress: return "in progress";
    }
    return "unknown result code";
}

/* What went wrong last in this thread, or in a stream of `comm`. */
EXPORT const char *ncclGetLastError(ncclComm_t comm) {
    return comm && comm->asyncError && !lastError[0] ? comm->asyncMessage : lastError;
}

EXPORT ncclResult_t ncclGroupStart(void) {
    groupDepth++;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclGroupEnd(void) {
    if (!groupDepth) return fail(ncclInvalidUsage, __func__, "no group was started in this thread");
    if (--groupDepth) return ncclSuccess;
    /* The group is taken out first: what runs it may call in here again. */
    Call *calls = queue;
    size_t count = queued;
    ncclResult_t result = groupError;
    queue = NULL;
    queued = room = 0;
    groupError = ncclSuccess;
    if (result)
        forget(calls, count);
    else if (count)
        result = run(calls, count);
    free(calls);
    return result;
}

/* -- communicators ----------------------------------------------------------------------------------------------- */

EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    if (!id) return fail(ncclInvalidArgument, __func__, "the id has nowhere to go: NULL");
    if (isMissing()) return fail(ncclInvalidUsage, __func__, MISSING);
    return (ncclResult_t)callbacks.uniqueId(id->internal, lastError);
}

static ncclResult_t initRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank, int device, const char *function) {
    if (!comm) return fail(ncclInvalidArgument, function, "the communicator has nowhere to go: NULL");
    *comm = NULL;
    if (size < 1 || rank < 0 || rank >= size)
        return fail(ncclInvalidArgument, function, "ranks are 0 to the number of ranks - 1");
    ncclComm_t made = motleyNcclNew(rank, size, device);
    if (!made) return fail(ncclSystemError, function, "no memory");
    made->id = id;
    ncclResult_t result = submit((Call){.kind = INIT, .comm = made}, function);
    if (!result) *comm = made; /* in a group: not to be used before its end */
    return result;
}

EXPORT ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) {
    return initRank(comm, size, id, rank, -1, __func__);
}

/* `config` tunes what is not here; calls that it may allow to return before their end end all the same. */
EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, void *config) {
    (void)config;
    return initRank(comm, size, id, rank, -1, __func__);
}

/* All ranks in this process. */
EXPORT ncclResult_t ncclCommInitAll(ncclComm_t *comms, int size, const int *devices) {
    ncclUniqueId id;
    if (!comms || size < 1) return fail(ncclInvalidArgument, __func__, "there must be a communicator at least");
    ncclResult_t result = ncclGetUniqueId(&id);
    if (result) return result;
    ncclGroupStart();
    for (int rank = 0; rank < size; rank++)
        initRank(&comms[rank], size, id, rank, devices ? devices[rank] : rank, __func__);
    result = ncclGroupEnd();
    for (int rank = 0; result && rank < size; rank++) comms[rank] = NULL;
    return result;
}

EXPORT ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *child, void *config) {
    (void)config;
    ncclResult_t result = check(comm, __func__);
    if (result) return result;
    if (!child) return fail(ncclInvalidArgument, __func__, "the new communicator has nowhere to go: NULL");
    *child = NULL;
    if (color < NO_COLOR) return fail(ncclInvalidArgument, __func__, "colors are 0 and more, or -1 for none");
    Call call = {.kind = SPLIT, .comm = comm, .peer = color, .key = key};
    if (color != NO_COLOR && !(call.child = motleyNcclNew(0, 1, comm->device)))
        return fail(ncclSystemError, __func__, "no memory");
    result = submit(call, __func__);
    if (!result) *child = call.child; /* its rank and size are set by then, or at the end of the group */
    return result;
}

static ncclResult_t end(ncclComm_t comm, int aborts, const char *function) {
    if (!comm) return ncclSuccess; /* as in NCCL: what a split has left out */
    ncclResult_t result = check(comm, function);
    if (result) return result;
    if (isMissing()) return fail(ncclInvalidUsage, function, MISSING);
    comm->alive = 0;
    return (ncclResult_t)callbacks.end(comm, aborts, lastError);
}

EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) { return end(comm, 0, __func__); }
EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) { return end(comm, 1, __func__); }

#define QUESTION(name, field) \
    EXPORT ncclResult_t name(ncclComm_t comm, int *out) { \
        ncclResult_t result = check(comm, __func__); \
        if (result) return result; \
        if (!out) return fail(ncclInvalidArgument, __func__, "the answer has nowhere to go: NULL"); \
        *out = comm->field; \
        return ncclSuccess; \
    }
QUESTION(ncclCommUserRank, rank)
QUESTION(ncclCommCount, size)
QUESTION(ncclCommCuDevice, device)
QUESTION(ncclCommGetAsyncError, asyncError)

/* -- collectives and messages ------------------------------------------------------------------------------------ */

#define COLLECTIVE \
    .send = send, .recv = recv, .count = count, .dataType = type, .comm = comm, .stream = stream
#define IS_ROOT (comm && comm->rank == root)
#define SIZE (comm ? comm->size : 1)

EXPORT ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, ncclComm_t comm,
                                  cudaStream_t stream) {
    return communicate((Call){.kind = ALL_REDUCE, .op = op, COLLECTIVE}, 1, 1, 1, __func__);
}

EXPORT ncclResult_t ncclReduce(const void *send, void *recv, size_t count, int type, int op, int root, ncclComm_t comm,
                               cudaStream_t stream) {
    return communicate((Call){.kind = REDUCE, .op = op, .peer = root, COLLECTIVE}, 1, IS_ROOT, 1, __func__);
}

EXPORT ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, int type, int op, ncclComm_t comm,
                                      cudaStream_t stream) {
    return communicate((Call){.kind = REDUCE_SCATTER, .op = op, COLLECTIVE}, 1, 1, SIZE, __func__);
}

EXPORT ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, int type, ncclComm_t comm,
                                  cudaStream_t stream) {
    return communicate((Call){.kind = ALL_GATHER, COLLECTIVE}, 1, 1, SIZE, __func__);
}

EXPORT ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, int type, int root, ncclComm_t comm,
                                  cudaStream_t stream) {
    return communicate((Call){.kind = BROADCAST, .peer = root, COLLECTIVE}, IS_ROOT, 1, 1, __func__);
}

EXPORT ncclResult_t ncclBcast(void *buffer, size_t count, int type, int root, ncclComm_t comm, cudaStream_t stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

EXPORT ncclResult_t ncclAlltoAll(const void *send, void *recv, size_t count, int type, ncclComm_t comm,
                                 cudaStream_t stream) {
    return communicate((Call){.kind = ALL_TO_ALL, COLLECTIVE}, 1, 1, SIZE, __func__);
}

EXPORT ncclResult_t ncclGather(const void *send, void *recv, size_t count, int type, int root, ncclComm_t comm,
                               cudaStream_t stream) {
    return communicate((Call){.kind = GATHER, .peer = root, COLLECTIVE}, 1, IS_ROOT, SIZE, __func__);
}

EXPORT ncclResult_t ncclScatter(const void *send, void *recv, size_t count, int type, int root, ncclComm_t comm,
                                cudaStream_t stream) {
    return communicate((Call){.kind = SCATTER, .peer = root, COLLECTIVE}, IS_ROOT, 1, SIZE, __func__);
}

EXPORT ncclResult_t ncclSend(const void *send, size_t count, int type, int peer, ncclComm_t comm, cudaStream_t stream) {
    void *recv = NULL;
    return communicate((Call){.kind = SEND, .peer = peer, COLLECTIVE}, 1, 0, 1, __func__);
}

EXPORT ncclResult_t ncclRecv(void *recv, size_t count, int type, int peer, ncclComm_t comm, cudaStream_t stream) {
    const void *send = NULL;
    return communicate((Call){.kind = RECV, .peer = peer, COLLECTIVE}, 0, 1, 1, __func__);
}

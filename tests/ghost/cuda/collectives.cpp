// NCCL: every collective is counted with its size; small ones are computed among the ranks (meeting.h).
#include <nccl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

#include "ledger.h"
#include "meeting.h"

struct ncclComm {
    std::string name;
    int ranks, rank;
    long collectives = 0;
    std::map<std::string, long> messages;  // between two ranks, each way
};

namespace {

using ghost::Payload;

thread_local int groups = 0;
// What waits for other ranks happens at the end of a group, after all of it was put.
thread_local std::vector<std::function<ncclResult_t()>>* waiting = nullptr;

size_t size_of(ncclDataType_t type) {
    switch (type) {
        case ncclInt8:
        case ncclUint8:
        case ncclFloat8e4m3:
        case ncclFloat8e5m2:
            return 1;
        case ncclFloat16:
        case ncclBfloat16:
            return 2;
        case ncclInt32:
        case ncclUint32:
        case ncclFloat32:
            return 4;
        default:
            return 8;
    }
}

const char* name_of(ncclDataType_t type) {
    static const char* names[] = {"int8",   "uint8",   "int32",   "uint32",  "int64",    "uint64",
                                  "float16", "float32", "float64", "bfloat16", "float8e4m3", "float8e5m2"};
    return type >= 0 && type < 12 ? names[type] : "?";
}

void note(const char* what, const ncclComm* comm, size_t count, ncclDataType_t type, int peer = -1) {
    std::string event = std::string("nccl:") + what + " " + std::to_string(count) + " " + name_of(type) + " " +
                        comm->name + " " + std::to_string(comm->rank) + "/" + std::to_string(comm->ranks);
    ghost::note(peer < 0 ? event : event + " peer " + std::to_string(peer));
}

ncclResult_t later(std::function<ncclResult_t()> wait) {
    if (!groups) return wait();
    if (!waiting) waiting = new std::vector<std::function<ncclResult_t()>>;
    waiting->push_back(std::move(wait));
    return ncclSuccess;
}

template <typename Number>
void reduce_as(const std::vector<Payload>& all, size_t count, ncclRedOp_t op, void* out) {
    for (size_t at = 0; at < count; ++at) {
        auto value = [&](const Payload& one) {
            Number number;
            memcpy(&number, one.bytes.data() + at * sizeof(Number), sizeof(Number));
            return number;
        };
        Number made = value(all[0]);
        for (size_t rank = 1; rank < all.size(); ++rank) {
            Number next = value(all[rank]);
            if (op == ncclMax) made = std::max(made, next);
            else if (op == ncclMin) made = std::min(made, next);
            else if (op == ncclProd) made = made * next;
            else made = made + next;
        }
        if (op == ncclAvg) made = made / static_cast<Number>(all.size());
        memcpy(static_cast<char*>(out) + at * sizeof(Number), &made, sizeof(Number));
    }
}

// 16-bit floating-point numbers are not computed: their ranks keep what they have.
bool reduce(const std::vector<Payload>& all, size_t count, ncclDataType_t type, ncclRedOp_t op, void* out) {
    switch (type) {
        case ncclInt8: return reduce_as<int8_t>(all, count, op, out), true;
        case ncclUint8: return reduce_as<uint8_t>(all, count, op, out), true;
        case ncclInt32: return reduce_as<int32_t>(all, count, op, out), true;
        case ncclUint32: return reduce_as<uint32_t>(all, count, op, out), true;
        case ncclInt64: return reduce_as<int64_t>(all, count, op, out), true;
        case ncclUint64: return reduce_as<uint64_t>(all, count, op, out), true;
        case ncclFloat32: return reduce_as<float>(all, count, op, out), true;
        case ncclFloat64: return reduce_as<double>(all, count, op, out), true;
        default: return false;
    }
}

// torch sends pickled objects as bytes: behind one that is shorter than another rank's, nothing is known.
bool holds_objects(ncclDataType_t type) { return type == ncclUint8; }

bool small(size_t bytes, ncclDataType_t type) {
    return bytes && bytes <= (holds_objects(type) ? ghost::kObjects : ghost::kMeeting);
}

// Puts what this rank has, and has `finish` called with what all have.
ncclResult_t meet(ncclComm* comm, const void* data, size_t bytes, ncclDataType_t type,
                  std::function<void(const std::vector<Payload>&)> finish) {
    std::string name = comm->name + "-" + std::to_string(comm->collectives++) + "-";
    ghost::put(name + std::to_string(comm->rank), data, bytes, holds_objects(type));
    return later([=] {
        std::vector<Payload> all(comm->ranks);
        for (int rank = 0; rank < comm->ranks; ++rank)
            if (!ghost::take(name + std::to_string(rank), &all[rank])) return ncclInternalError;
        for (const Payload& one : all)
            if (one.bytes.size() != bytes) {
                fprintf(stderr, "ghost CUDA: ranks of %s bring %zu and %zu bytes\n", name.c_str(), bytes,
                        one.bytes.size());
                return ncclInvalidUsage;
            }
        finish(all);
        return ncclSuccess;
    });
}

bool all_known(const std::vector<Payload>& all) {
    return std::all_of(all.begin(), all.end(), [](const Payload& one) { return one.known; });
}

ncclResult_t make(ncclComm_t* comm, const std::string& name, int ranks, int rank) {
    *comm = new ncclComm{name, ranks, rank};
    return ncclSuccess;
}

std::string text_of(const ncclUniqueId& id) { return std::string(id.internal, strnlen(id.internal, sizeof id)); }

}  // namespace

// ---- communicators
GHOST ncclResult_t ncclGetVersion(int* version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
GHOST ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    static std::atomic<int> made{0};
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "c%d_%d", getpid(), made++);
    return ncclSuccess;
}
GHOST ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
    return make(comm, text_of(id), ranks, rank);
}
GHOST ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t*) {
    return make(comm, text_of(id), ranks, rank);
}
GHOST ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int ranks, int rank, int, ncclUniqueId* ids,
                                            ncclConfig_t*) {
    return make(comm, text_of(*ids), ranks, rank);
}
GHOST ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* out, ncclConfig_t*) {
    int mine[2] = {color, key};
    std::string name = comm->name + "_" + std::to_string(comm->collectives) + "s" + std::to_string(color);
    return meet(comm, mine, sizeof mine, ncclInt32, [=](const std::vector<Payload>& all) {
        std::vector<std::pair<int, int>> members;  // key and rank of those of this colour, in their order
        for (int rank = 0; rank < comm->ranks; ++rank) {
            int theirs[2];
            memcpy(theirs, all[rank].bytes.data(), sizeof theirs);
            if (theirs[0] == color) members.push_back({theirs[1], rank});
        }
        std::sort(members.begin(), members.end());
        auto me = std::find(members.begin(), members.end(), std::make_pair(key, comm->rank));
        *out = nullptr;
        if (color != NCCL_SPLIT_NOCOLOR)
            make(out, name, static_cast<int>(members.size()), static_cast<int>(me - members.begin()));
    });
}
GHOST ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) { return *count = comm->ranks, ncclSuccess; }
GHOST ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { return *rank = comm->rank, ncclSuccess; }
GHOST ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) { return *error = ncclSuccess, ncclSuccess; }
GHOST ncclResult_t ncclCommAbort(ncclComm_t) { return ncclSuccess; }
GHOST ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }
GHOST ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
GHOST ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) {
    return *handle = nullptr, ncclSuccess;
}
GHOST ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
GHOST const char* ncclGetErrorString(ncclResult_t) { return "an error of ghost CUDA's NCCL"; }
GHOST const char* ncclGetLastError(ncclComm_t) { return ""; }
GHOST ncclResult_t ncclMemAlloc(void** address, size_t bytes) {
    return cudaMalloc(address, bytes) == cudaSuccess ? ncclSuccess : ncclSystemError;
}
GHOST ncclResult_t ncclMemFree(void* address) { return cudaFree(address), ncclSuccess; }
GHOST ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void*, ncclDataType_t, ncclScalarResidence_t,
                                            ncclComm_t) {
    return *op = ncclSum, ncclSuccess;
}
GHOST ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }

GHOST const char* ghost_name_of(const ncclComm* comm) { return comm->name.c_str(); }

// ---- groups
GHOST ncclResult_t ncclGroupStart() { return ++groups, ncclSuccess; }
GHOST ncclResult_t ncclGroupEnd() {
    if (--groups || !waiting) return ncclSuccess;
    auto all = std::move(*waiting);
    waiting->clear();
    for (auto& wait : all)
        if (ncclResult_t result = wait()) return result;
    return ncclSuccess;
}

// ---- collectives
GHOST ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                 ncclComm_t comm, cudaStream_t) {
    note("AllReduce", comm, count, type);
    size_t bytes = count * size_of(type);
    if (!small(bytes, type)) return ncclSuccess;
    return meet(comm, from, bytes, type, [=](const std::vector<Payload>& all) {
        if (reduce(all, count, type, op, to) && all_known(all)) ghost::set_known(to, bytes);
    });
}
GHOST ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                              ncclComm_t comm, cudaStream_t) {
    note("Reduce", comm, count, type, root);
    size_t bytes = count * size_of(type);
    if (!small(bytes, type)) return ncclSuccess;
    return meet(comm, from, bytes, type, [=](const std::vector<Payload>& all) {
        if (comm->rank == root && reduce(all, count, type, op, to) && all_known(all)) ghost::set_known(to, bytes);
    });
}
GHOST ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                                 ncclComm_t comm, cudaStream_t) {
    note("Broadcast", comm, count, type, root);
    size_t bytes = count * size_of(type);
    if (!small(bytes, type)) return ncclSuccess;
    return meet(comm, from, bytes, type, [=](const std::vector<Payload>& all) {
        memcpy(to, all[root].bytes.data(), bytes);
        if (all[root].known) ghost::set_known(to, bytes);
    });
}
GHOST ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                             cudaStream_t stream) {
    return ncclBroadcast(data, data, count, type, root, comm, stream);
}
GHOST ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                                 cudaStream_t) {
    note("AllGather", comm, count, type);
    size_t bytes = count * size_of(type);
    if (!small(bytes, type)) return ncclSuccess;
    return meet(comm, from, bytes, type, [=](const std::vector<Payload>& all) {
        for (int rank = 0; rank < comm->ranks; ++rank)
            memcpy(static_cast<char*>(to) + rank * bytes, all[rank].bytes.data(), bytes);
        if (all_known(all)) ghost::set_known(to, bytes * comm->ranks);
    });
}
GHOST ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                     ncclComm_t comm, cudaStream_t) {
    note("ReduceScatter", comm, count, type);
    size_t bytes = count * size_of(type);
    if (!small(bytes * comm->ranks, type)) return ncclSuccess;
    return meet(comm, from, bytes * comm->ranks, type, [=](const std::vector<Payload>& all) {
        std::vector<char> whole(bytes * comm->ranks);
        if (!reduce(all, count * comm->ranks, type, op, whole.data())) return;
        memcpy(to, whole.data() + comm->rank * bytes, bytes);
        if (all_known(all)) ghost::set_known(to, bytes);
    });
}
GHOST ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                                cudaStream_t) {
    note("AlltoAll", comm, count, type);
    size_t bytes = count * size_of(type);
    if (!small(bytes * comm->ranks, type)) return ncclSuccess;
    return meet(comm, from, bytes * comm->ranks, type, [=](const std::vector<Payload>& all) {
        for (int rank = 0; rank < comm->ranks; ++rank)
            memcpy(static_cast<char*>(to) + rank * bytes, all[rank].bytes.data() + comm->rank * bytes, bytes);
        if (all_known(all)) ghost::set_known(to, bytes * comm->ranks);
    });
}

// ---- between two ranks
namespace {

// The name of the next message, which is counted at each end: a rank may send to itself.
std::string message(ncclComm* comm, int from, int to, const char* end) {
    std::string name = comm->name + "-from" + std::to_string(from) + "to" + std::to_string(to) + "-";
    return name + std::to_string(comm->messages[name + end]++);
}

}  // namespace

GHOST ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                            cudaStream_t) {
    note("Send", comm, count, type, peer);
    size_t bytes = count * size_of(type);
    std::string name = message(comm, comm->rank, peer, "sent");
    if (small(bytes, type)) ghost::put(name, data, bytes, holds_objects(type));
    return ncclSuccess;
}
GHOST ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t) {
    note("Recv", comm, count, type, peer);
    size_t bytes = count * size_of(type);
    std::string name = message(comm, peer, comm->rank, "received");
    if (!small(bytes, type)) return ncclSuccess;
    return later([=] {
        Payload sent;
        if (!ghost::take(name, &sent)) return ncclInternalError;
        if (sent.bytes.size() != bytes) return ncclInvalidUsage;
        memcpy(data, sent.bytes.data(), bytes);
        if (sent.known) ghost::set_known(data, bytes);
        return ncclSuccess;
    });
}

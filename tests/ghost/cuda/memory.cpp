// Device memory is memory of the host. Copies are done and counted; what kernels would write stays as it was.
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

#include "ledger.h"

namespace {

struct Block {
    size_t bytes;
    bool pinned;
    int device;
};

std::mutex& lock() {
    static auto* made = new std::mutex;
    return *made;
}
std::map<uintptr_t, Block>& blocks() {
    static auto* made = new std::map<uintptr_t, Block>;
    return *made;
}
// begin -> end of what is known (ledger.h)
std::map<uintptr_t, uintptr_t>& known() {
    static auto* made = new std::map<uintptr_t, uintptr_t>;
    return *made;
}
size_t used[64];

constexpr size_t kPage = 4096;
// Of what is larger nobody keeps whether it is known: copies within the device are counted only, and reads give what is
// there.
constexpr size_t kMoved = 1 << 20;

uintptr_t number(const void* address) { return reinterpret_cast<uintptr_t>(address); }

// Takes a range out of what is known; what stands before and after it stays.
void forget(uintptr_t begin, uintptr_t end) {
    auto& all = known();
    auto at = all.lower_bound(begin);
    if (at != all.begin() && std::prev(at)->second > begin) --at;
    while (at != all.end() && at->first < end) {
        auto [first, last] = *at;
        at = all.erase(at);
        if (first < begin) all[first] = begin;
        if (last > end) all[end] = last;
    }
}

// Adds a range to what is known, joined with those that it touches.
void learn(uintptr_t begin, uintptr_t end) {
    auto& all = known();
    forget(begin, end);
    auto after = all.find(end);
    if (after != all.end()) {
        end = after->second;
        all.erase(after);
    }
    auto before = all.lower_bound(begin);
    if (before != all.begin() && std::prev(before)->second == begin)
        std::prev(before)->second = end;
    else
        all[begin] = end;
}

cudaError_t take(void** address, size_t bytes, bool pinned) {
    size_t whole = std::max(kPage, (bytes + kPage - 1) / kPage * kPage);
    int device = ghost::current_device();
    std::lock_guard<std::mutex> guard(lock());
    *address = nullptr;
    if (!pinned && used[device] + whole > ghost::memory_limit()) return cudaErrorMemoryAllocation;
    void* made =
        mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) return cudaErrorMemoryAllocation;
    blocks()[number(made)] = {whole, pinned, device};
    if (!pinned) used[device] += whole;
    *address = made;
    return cudaSuccess;
}

cudaError_t give(void* address) {
    if (!address) return cudaSuccess;
    std::lock_guard<std::mutex> guard(lock());
    auto at = blocks().find(number(address));
    if (at == blocks().end()) return cudaErrorInvalidValue;
    if (!at->second.pinned) used[at->second.device] -= at->second.bytes;
    forget(at->first, at->first + at->second.bytes);
    munmap(address, at->second.bytes);
    blocks().erase(at);
    return cudaSuccess;
}

const char* kind_of(ghost::Place to, ghost::Place from) {
    using ghost::Place;
    if (to == Place::device)
        return from == Place::device ? "D2D" : from == Place::pinned ? "H2D pinned" : "H2D pageable";
    if (from == Place::device) return to == Place::pinned ? "D2H pinned" : "D2H pageable";
    return "H2H";
}

void copy(void* to, const void* from, size_t bytes) {
    using ghost::Place;
    Place into = ghost::place_of(to), out_of = ghost::place_of(from);
    ghost::note(std::string("copy:") + kind_of(into, out_of) + " " + std::to_string(bytes));
    bool computed = out_of == Place::device && !ghost::is_known(from, bytes);
    if (into == Place::device && out_of == Place::device && bytes > kMoved) return;
    if (into != Place::device && computed && bytes <= kMoved) {
        memset(to, 0, bytes);
        return;
    }
    memmove(to, from, bytes);
    if (into == Place::device && !computed) ghost::set_known(to, bytes);
}

}  // namespace

namespace ghost {

Place place_of(const void* address) {
    std::lock_guard<std::mutex> guard(lock());
    auto at = blocks().upper_bound(number(address));
    if (at == blocks().begin()) return Place::unknown;
    --at;
    if (number(address) >= at->first + at->second.bytes) return Place::unknown;
    return at->second.pinned ? Place::pinned : Place::device;
}

void set_known(const void* address, size_t bytes) {
    if (!bytes || bytes > kMoved) return;
    std::lock_guard<std::mutex> guard(lock());
    learn(number(address), number(address) + bytes);
}

bool is_known(const void* address, size_t bytes) {
    std::lock_guard<std::mutex> guard(lock());
    auto at = known().upper_bound(number(address));
    if (at == known().begin()) return false;
    --at;
    return number(address) + bytes <= at->second;
}

}  // namespace ghost

// Called with what torch's allocator takes back (torch/allocator.cpp): what is known there is of a tensor that is gone.
GHOST void ghost_forget(void* address, size_t bytes) {
    std::lock_guard<std::mutex> guard(lock());
    forget(number(address), number(address) + bytes);
}

GHOST cudaError_t cudaMalloc(void** address, size_t bytes) { return take(address, bytes, false); }
GHOST cudaError_t cudaMallocAsync(void** address, size_t bytes, cudaStream_t) { return take(address, bytes, false); }
GHOST cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) { return take(address, bytes, true); }
GHOST cudaError_t cudaMallocHost(void** address, size_t bytes) { return take(address, bytes, true); }
GHOST cudaError_t cudaFree(void* address) { return give(address); }
GHOST cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return give(address); }
GHOST cudaError_t cudaFreeHost(void* address) { return give(address); }
GHOST cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
GHOST cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }

GHOST cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    std::lock_guard<std::mutex> guard(lock());
    *total = ghost::memory_limit();
    *free = *total - used[ghost::current_device()];
    return cudaSuccess;
}

GHOST cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* address) {
    *out = {};
    ghost::Place place = ghost::place_of(address);
    out->type = place == ghost::Place::device   ? cudaMemoryTypeDevice
                : place == ghost::Place::pinned ? cudaMemoryTypeHost
                                                : cudaMemoryTypeUnregistered;
    out->device = ghost::current_device();
    if (place == ghost::Place::unknown) return cudaSuccess;
    out->devicePointer = const_cast<void*>(address);
    if (place == ghost::Place::pinned) out->hostPointer = const_cast<void*>(address);
    return cudaSuccess;
}

GHOST cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    copy(to, from, bytes);
    ghost::note("sync:cudaMemcpy");
    return cudaSuccess;
}
GHOST cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    copy(to, from, bytes);
    return cudaSuccess;
}
GHOST cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t) {
    copy(to, from, bytes);
    return cudaSuccess;
}
GHOST cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                    size_t height, cudaMemcpyKind, cudaStream_t) {
    for (size_t row = 0; row < height; ++row)
        memmove(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
    ghost::note("copy:2D " + std::to_string(width * height));
    return cudaSuccess;
}
GHOST cudaError_t cudaMemset(void*, int, size_t bytes) {
    ghost::note("memset:" + std::to_string(bytes));
    return cudaSuccess;
}
GHOST cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t) {
    return cudaMemset(address, value, bytes);
}

GHOST cudaError_t cudaGetSymbolAddress(void** address, const void*) {
    static char* symbols = new char[1 << 20]();
    *address = symbols;
    return cudaSuccess;
}
GHOST cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t bytes, size_t, cudaMemcpyKind) {
    ghost::note("copy:H2D pageable " + std::to_string(bytes));
    return cudaSuccess;
}
GHOST cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
    *pool = reinterpret_cast<cudaMemPool_t>(16);
    return cudaSuccess;
}

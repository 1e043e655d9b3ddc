// The CUDA runtime but for memory: GPUs that look like an H100, streams on which all is done at once, and kernels that
// are counted where they are launched.
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "ledger.h"

namespace {

thread_local int current = 0;
thread_local cudaError_t last = cudaSuccess;

cudaError_t fail(cudaError_t error) { return last = error; }

// Properties and attributes are told by one table, so that both say the same.
struct Limit {
    cudaDeviceAttr attribute;
    int value;
};
// Of an H100 SXM (cudaDeviceProp of its documentation, "CUDA C++ Programming Guide", compute capability 9.0).
constexpr Limit kH100[] = {
    {cudaDevAttrComputeCapabilityMajor, 9},
    {cudaDevAttrComputeCapabilityMinor, 0},
    {cudaDevAttrMaxThreadsPerBlock, 1024},
    {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
    {cudaDevAttrMultiProcessorCount, 132},
    {cudaDevAttrWarpSize, 32},
    {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
    {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
    {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
    {cudaDevAttrReservedSharedMemoryPerBlock, 1024},
    {cudaDevAttrMaxRegistersPerBlock, 65536},
    {cudaDevAttrMaxRegistersPerMultiprocessor, 65536},
    {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
    {cudaDevAttrMaxBlockDimX, 1024},
    {cudaDevAttrMaxBlockDimY, 1024},
    {cudaDevAttrMaxBlockDimZ, 64},
    {cudaDevAttrMaxGridDimX, 2147483647},
    {cudaDevAttrMaxGridDimY, 65535},
    {cudaDevAttrMaxGridDimZ, 65535},
    {cudaDevAttrL2CacheSize, 52428800},
    {cudaDevAttrCooperativeLaunch, 1},
    {cudaDevAttrTextureAlignment, 512},
    {cudaDevAttrMemoryPoolsSupported, 1},
    {cudaDevAttrUnifiedAddressing, 1},
    {cudaDevAttrConcurrentKernels, 1},
    {cudaDevAttrAsyncEngineCount, 3},
    {cudaDevAttrGlobalMemoryBusWidth, 5120},
    {cudaDevAttrClockRate, 1980000},
    {cudaDevAttrMemoryClockRate, 2619000},
    {cudaDevAttrManagedMemory, 1},
    {cudaDevAttrStreamPrioritiesSupported, 1},
};

int limit_of(cudaDeviceAttr attribute) {
    for (const Limit& limit : kH100)
        if (limit.attribute == attribute) return limit.value;
    return 0;
}

std::mutex& lock() {
    static auto* made = new std::mutex;
    return *made;
}
std::unordered_map<const void*, const char*>& kernels() {
    static auto* made = new std::unordered_map<const void*, const char*>;
    return *made;
}

cudaError_t launch(const void* function, dim3 grid, dim3 block) {
    size_t threads = static_cast<size_t>(block.x) * block.y * block.z;
    bool fits = grid.x && grid.y && grid.z && grid.y <= 65535 && grid.z <= 65535 && threads && threads <= 1024;
    if (!fits) return fail(cudaErrorInvalidConfiguration);
    std::string name = "?";
    {
        std::lock_guard<std::mutex> guard(lock());
        auto at = kernels().find(function);
        if (at != kernels().end()) name = at->second;
    }
    ghost::note("kernel:" + name);
    return cudaSuccess;
}

struct Configuration {
    dim3 grid, block;
    size_t shared;
    void* stream;
};
thread_local std::vector<Configuration>* configurations = nullptr;

struct Event {
    std::chrono::steady_clock::time_point at;
};

}  // namespace

int ghost::current_device() { return current; }

// ---- devices
GHOST cudaError_t cudaGetDeviceCount(int* count) { return *count = ghost::devices(), cudaSuccess; }
GHOST cudaError_t cudaGetDevice(int* device) { return *device = current, cudaSuccess; }
GHOST cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= ghost::devices()) return fail(cudaErrorInvalidDevice);
    current = device;
    return cudaSuccess;
}
GHOST cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    *value = limit_of(attribute);
    return cudaSuccess;
}
GHOST cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int device) {
    *out = {};
    strcpy(out->name, "GHOST H100 (computes nothing)");
    out->uuid.bytes[0] = static_cast<char>(device + 1);
    out->pciBusID = device + 1;
    out->totalGlobalMem = ghost::memory_limit();
    out->totalConstMem = 65536;
    out->memPitch = 2147483647;
    out->major = limit_of(cudaDevAttrComputeCapabilityMajor);
    out->minor = limit_of(cudaDevAttrComputeCapabilityMinor);
    out->maxThreadsPerBlock = limit_of(cudaDevAttrMaxThreadsPerBlock);
    out->maxThreadsPerMultiProcessor = limit_of(cudaDevAttrMaxThreadsPerMultiProcessor);
    out->multiProcessorCount = limit_of(cudaDevAttrMultiProcessorCount);
    out->warpSize = limit_of(cudaDevAttrWarpSize);
    out->sharedMemPerBlock = limit_of(cudaDevAttrMaxSharedMemoryPerBlock);
    out->sharedMemPerBlockOptin = limit_of(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    out->sharedMemPerMultiprocessor = limit_of(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    out->reservedSharedMemPerBlock = limit_of(cudaDevAttrReservedSharedMemoryPerBlock);
    out->regsPerBlock = limit_of(cudaDevAttrMaxRegistersPerBlock);
    out->regsPerMultiprocessor = limit_of(cudaDevAttrMaxRegistersPerMultiprocessor);
    out->maxBlocksPerMultiProcessor = limit_of(cudaDevAttrMaxBlocksPerMultiprocessor);
    out->l2CacheSize = limit_of(cudaDevAttrL2CacheSize);
    out->memoryBusWidth = limit_of(cudaDevAttrGlobalMemoryBusWidth);
    out->textureAlignment = limit_of(cudaDevAttrTextureAlignment);
    out->maxThreadsDim[0] = limit_of(cudaDevAttrMaxBlockDimX);
    out->maxThreadsDim[1] = limit_of(cudaDevAttrMaxBlockDimY);
    out->maxThreadsDim[2] = limit_of(cudaDevAttrMaxBlockDimZ);
    out->maxGridSize[0] = limit_of(cudaDevAttrMaxGridDimX);
    out->maxGridSize[1] = limit_of(cudaDevAttrMaxGridDimY);
    out->maxGridSize[2] = limit_of(cudaDevAttrMaxGridDimZ);
    out->asyncEngineCount = limit_of(cudaDevAttrAsyncEngineCount);
    out->canMapHostMemory = out->concurrentKernels = out->unifiedAddressing = out->managedMemory = 1;
    out->streamPrioritiesSupported = out->cooperativeLaunch = out->memoryPoolsSupported = out->clusterLaunch = 1;
    return cudaSuccess;
}
GHOST cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
    snprintf(text, length, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}
GHOST cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 1, cudaSuccess; }
GHOST cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
GHOST cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
GHOST cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
GHOST cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
GHOST cudaError_t cudaDeviceSynchronize() { return ghost::note("sync:cudaDeviceSynchronize"), cudaSuccess; }
GHOST cudaError_t cudaPeekAtLastError() { return last; }
GHOST cudaError_t cudaGetLastError() {
    cudaError_t error = last;
    last = cudaSuccess;
    return error;
}
GHOST cudaError_t cudaProfilerStart() { return cudaSuccess; }
GHOST cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- streams: what is put on one is done before the call returns
GHOST cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
    static std::atomic<long> made{64};
    *stream = reinterpret_cast<cudaStream_t>(made++);
    return cudaSuccess;
}
GHOST cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
GHOST cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
GHOST cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
GHOST cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
GHOST cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
GHOST cudaError_t cudaStreamSynchronize(cudaStream_t) {
    return ghost::note("sync:cudaStreamSynchronize"), cudaSuccess;
}
GHOST cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
    return ghost::note("event:cudaStreamWaitEvent"), cudaSuccess;
}
GHOST cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
GHOST cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                           cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                           size_t*) {
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    return cudaSuccess;
}
GHOST cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
GHOST cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
    function(stream, cudaSuccess, data);
    return cudaSuccess;
}
GHOST cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
    function(data);
    return cudaSuccess;
}

// ---- events
GHOST cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = reinterpret_cast<cudaEvent_t>(new Event{});
    return cudaSuccess;
}
GHOST cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
GHOST cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete reinterpret_cast<Event*>(event);
    return cudaSuccess;
}
GHOST cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
    reinterpret_cast<Event*>(event)->at = std::chrono::steady_clock::now();
    ghost::note("event:cudaEventRecord");
    return cudaSuccess;
}
GHOST cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}
GHOST cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
GHOST cudaError_t cudaEventSynchronize(cudaEvent_t) {
    return ghost::note("sync:cudaEventSynchronize"), cudaSuccess;
}
GHOST cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    auto between = reinterpret_cast<Event*>(end)->at - reinterpret_cast<Event*>(begin)->at;
    *milliseconds = std::chrono::duration<float, std::milli>(between).count() + 1e-3f;  // never 0: it is divided by
    return cudaSuccess;
}

// ---- kernels, as nvcc's code registers and launches them
GHOST void** __cudaRegisterFatBinary(void*) {
    static void* handle[4];
    return handle;
}
GHOST void __cudaRegisterFatBinaryEnd(void**) {}
GHOST void __cudaUnregisterFatBinary(void**) {}
GHOST char __cudaInitModule(void**) { return 1; }
GHOST void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
GHOST void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*,
                                  void*, int*) {
    std::lock_guard<std::mutex> guard(lock());
    kernels()[function] = name;
}
GHOST unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
    if (!configurations) configurations = new std::vector<Configuration>;
    configurations->push_back({grid, block, shared, stream});
    return 0;
}
GHOST cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    Configuration top = configurations->back();
    configurations->pop_back();
    *grid = top.grid;
    *block = top.block;
    *shared = top.shared;
    *static_cast<void**>(stream) = top.stream;
    return cudaSuccess;
}
GHOST cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**, size_t, cudaStream_t) {
    return launch(function, grid, block);
}
GHOST cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void**, size_t,
                                              cudaStream_t) {
    return launch(function, grid, block);
}
GHOST cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
    return launch(function, config->gridDim, config->blockDim);
}
GHOST cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
    return cudaSuccess;
}
GHOST cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t, cudaStream_t) {
    return launch(reinterpret_cast<const void*>(kernel), grid, block);
}
GHOST cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
    *out = {};
    out->ptxVersion = out->binaryVersion = 90;
    out->maxThreadsPerBlock = 1024;
    out->numRegs = 64;
    out->maxDynamicSharedSizeBytes = 49152;
    return cudaSuccess;
}
GHOST cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
GHOST cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }
GHOST cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int, size_t) {
    return *count = 2, cudaSuccess;
}
GHOST cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t,
                                                                         unsigned) {
    return *count = 2, cudaSuccess;
}
GHOST cudaError_t cudaOccupancyMaxActiveClusters(int* count, const void*, const cudaLaunchConfig_t*) {
    return *count = 66, cudaSuccess;
}

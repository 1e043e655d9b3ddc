// libcuda, whose name this library carries: what torch, Transformer Engine and Triton ask of the driver itself.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "ledger.h"

namespace {

// Handles that are only handed back: contexts, modules, libraries.
template <typename Handle>
CUresult handle(Handle* out) {
    static char* thing = new char[64]();
    *out = reinterpret_cast<Handle>(thing);
    return CUDA_SUCCESS;
}

std::mutex& lock() {
    static auto* made = new std::mutex;
    return *made;
}
// Kernels that are loaded by name, as Triton's are.
std::unordered_map<const void*, std::string>& functions() {
    static auto* made = new std::unordered_map<const void*, std::string>;
    return *made;
}

void* function_of(const char* name) {
    std::lock_guard<std::mutex> guard(lock());
    char* made = new char[8]();
    functions()[made] = name ? name : "?";
    return made;
}

CUresult launch(const void* function) {
    std::string name = "?";
    {
        std::lock_guard<std::mutex> guard(lock());
        auto at = functions().find(function);
        if (at != functions().end()) name = at->second;
    }
    ghost::note("kernel:" + name);
    return CUDA_SUCCESS;
}

CUresult result_of(cudaError_t error) { return static_cast<CUresult>(error); }  // the two number errors alike

}  // namespace

GHOST CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
GHOST CUresult cuDriverGetVersion(int* version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
GHOST CUresult cuGetErrorString(CUresult, const char** text) { return *text = "an error of ghost CUDA", CUDA_SUCCESS; }
GHOST CUresult cuGetErrorName(CUresult, const char** text) { return *text = "GHOST_ERROR", CUDA_SUCCESS; }
GHOST CUresult cuLogsRegisterCallback(CUlogsCallback, void*, CUlogsCallbackHandle* callback) { return handle(callback); }
GHOST CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle) { return CUDA_SUCCESS; }

// ---- where functions are asked for by name
GHOST CUresult cuGetProcAddress_v2(const char* name, void** function, int, cuuint64_t,
                                   CUdriverProcAddressQueryResult* found) {
    *function = dlsym(RTLD_DEFAULT, name);
    // The version with a suffix is the one that a program built today means.
    if (void* newer = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str())) *function = newer;
    if (found) *found = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
GHOST cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                   cudaDriverEntryPointQueryResult* found) {
    CUresult result = cuGetProcAddress_v2(name, function, 0, 0, nullptr);
    if (found) *found = result ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

// ---- devices and contexts
GHOST CUresult cuDeviceGet(CUdevice* device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
GHOST CUresult cuDeviceGetCount(int* count) { return *count = ghost::devices(), CUDA_SUCCESS; }
GHOST CUresult cuDeviceGetName(char* name, int length, CUdevice) {
    strncpy(name, "GHOST H100", length);
    return CUDA_SUCCESS;
}
GHOST CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    return result_of(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device));
}
GHOST CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice) { return *bytes = ghost::memory_limit(), CUDA_SUCCESS; }
GHOST CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}
GHOST CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return handle(context); }
GHOST CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
GHOST CUresult cuCtxGetCurrent(CUcontext* context) { return handle(context); }
GHOST CUresult cuStreamGetCtx_v2(CUstream, CUcontext* context, CUgreenCtx* green) {
    if (green) *green = nullptr;
    return handle(context);
}
GHOST CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
GHOST CUresult cuCtxPushCurrent_v2(CUcontext) { return CUDA_SUCCESS; }
GHOST CUresult cuCtxPopCurrent_v2(CUcontext* context) { return handle(context); }
GHOST CUresult cuCtxGetDevice(CUdevice* device) { return *device = ghost::current_device(), CUDA_SUCCESS; }
GHOST CUresult cuCtxGetApiVersion(CUcontext, unsigned* version) { return *version = 13000, CUDA_SUCCESS; }
GHOST CUresult cuCtxSynchronize() { return ghost::note("sync:cuCtxSynchronize"), CUDA_SUCCESS; }

// ---- memory and streams
GHOST CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
    return result_of(cudaMalloc(reinterpret_cast<void**>(address), bytes));
}
GHOST CUresult cuMemFree_v2(CUdeviceptr address) { return result_of(cudaFree(reinterpret_cast<void*>(address))); }
GHOST CUresult cuMemGetInfo_v2(size_t* free, size_t* total) { return result_of(cudaMemGetInfo(free, total)); }
GHOST CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
    const void* source = reinterpret_cast<const void*>(from);
    return result_of(cudaMemcpyAsync(to, source, bytes, cudaMemcpyDeviceToHost, stream));
}
GHOST CUresult cuMemsetD32Async(CUdeviceptr, unsigned, size_t count, CUstream) {
    return ghost::note("memset:" + std::to_string(4 * count)), CUDA_SUCCESS;
}
GHOST CUresult cuPointerGetAttribute(void* out, CUpointer_attribute attribute, CUdeviceptr address) {
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
            *static_cast<CUdeviceptr*>(out) = address;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
            *static_cast<int*>(out) = ghost::current_device();
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: {
            bool device = ghost::place_of(reinterpret_cast<void*>(address)) == ghost::Place::device;
            *static_cast<unsigned*>(out) = device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
            return CUDA_SUCCESS;
        }
        default:
            ghost::refuse("cuPointerGetAttribute of another kind");
            return CUDA_ERROR_NOT_SUPPORTED;
    }
}
GHOST CUresult cuStreamSynchronize(CUstream) { return ghost::note("sync:cuStreamSynchronize"), CUDA_SUCCESS; }
GHOST CUresult cuStreamGetCaptureInfo_v2(CUstream, CUstreamCaptureStatus* status, cuuint64_t*, CUgraph*,
                                         const CUgraphNode**, size_t*) {
    return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS;
}
GHOST CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
    return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS;
}
GHOST CUresult cuMulticastGetGranularity(size_t* bytes, const CUmulticastObjectProp*,
                                         CUmulticastGranularity_flags) {
    return *bytes = 2 << 20, CUDA_SUCCESS;
}

// ---- kernels that are loaded at run time
GHOST CUresult cuModuleLoad(CUmodule* module, const char*) { return handle(module); }
GHOST CUresult cuModuleLoadData(CUmodule* module, const void*) { return handle(module); }
GHOST CUresult cuModuleLoadDataEx(CUmodule* module, const void*, unsigned, CUjit_option*, void**) {
    return handle(module);
}
GHOST CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
GHOST CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
    *function = static_cast<CUfunction>(function_of(name));
    return CUDA_SUCCESS;
}
GHOST CUresult cuModuleGetGlobal_v2(CUdeviceptr* address, size_t* bytes, CUmodule, const char*) {
    if (bytes) *bytes = 1 << 16;
    return address ? cuMemAlloc_v2(address, 1 << 16) : CUDA_SUCCESS;
}
GHOST CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
GHOST CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
GHOST CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
    return *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, CUDA_SUCCESS;
}
GHOST CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, CUfunction, int, size_t) {
    return *count = 2, CUDA_SUCCESS;
}
GHOST CUresult cuOccupancyMaxActiveClusters(int* count, CUfunction, const CUlaunchConfig*) {
    return *count = 66, CUDA_SUCCESS;
}
GHOST CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                      const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                                      CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                      CUtensorMapFloatOOBfill) {
    return memset(map, 0, sizeof *map), CUDA_SUCCESS;
}
GHOST CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                              unsigned, CUstream, void**, void**) {
    return launch(function);
}
GHOST CUresult cuLaunchKernelEx(const CUlaunchConfig*, CUfunction function, void**, void**) {
    return launch(function);
}
GHOST CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned,
                                         unsigned, unsigned, CUstream, void**) {
    return launch(function);
}

// cuBLAS, cuBLASLt and cuDNN: a product is counted with its shape, a cuDNN plan is always found and counted where it
// is run. Descriptors of cuBLASLt are the real library's: they live on the host.
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cudnn.h>
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

#include "ledger.h"

namespace {

cublasStatus_t product(const char* function, long m, long n, long k) {
    ghost::note("gemm:" + std::string(function) + " " + std::to_string(m) + "x" + std::to_string(n) + "x" +
                std::to_string(k));
    return CUBLAS_STATUS_SUCCESS;
}

long layout_attribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute) {
    static auto read = reinterpret_cast<decltype(&cublasLtMatrixLayoutGetAttribute)>(
        dlsym(RTLD_DEFAULT, "cublasLtMatrixLayoutGetAttribute"));
    uint64_t value = 0;
    size_t written = 0;
    if (read) read(layout, attribute, &value, sizeof value, &written);
    return static_cast<long>(value);
}

struct Descriptor {
    cudnnBackendDescriptorType_t type;
};

}  // namespace

// ---- cuBLAS
GHOST cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
    *handle = static_cast<cublasHandle_t>(calloc(1, 256));
    return CUBLAS_STATUS_SUCCESS;
}
GHOST cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) { return free(handle), CUBLAS_STATUS_SUCCESS; }
GHOST cublasStatus_t cublasSetStream_v2(cublasHandle_t, cudaStream_t) { return CUBLAS_STATUS_SUCCESS; }
GHOST cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void*, size_t) { return CUBLAS_STATUS_SUCCESS; }
GHOST cublasStatus_t cublasSetSmCountTarget(cublasHandle_t, int) { return CUBLAS_STATUS_SUCCESS; }
GHOST cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) { return CUBLAS_STATUS_SUCCESS; }
GHOST cublasStatus_t cublasGetMathMode(cublasHandle_t, cublasMath_t* mode) {
    return *mode = CUBLAS_DEFAULT_MATH, CUBLAS_STATUS_SUCCESS;
}
GHOST cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t, cublasPointerMode_t) { return CUBLAS_STATUS_SUCCESS; }
GHOST cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t, cublasPointerMode_t* mode) {
    return *mode = CUBLAS_POINTER_MODE_HOST, CUBLAS_STATUS_SUCCESS;
}
GHOST cublasStatus_t cublasGemmEx(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                                  const void*, const void*, cudaDataType, int, const void*, cudaDataType, int,
                                  const void*, void*, cudaDataType, int, cublasComputeType_t, cublasGemmAlgo_t) {
    return product("GemmEx", m, n, k);
}
GHOST cublasStatus_t cublasSgemmEx(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                                   const float*, const void*, cudaDataType, int, const void*, cudaDataType, int,
                                   const float*, void*, cudaDataType, int) {
    return product("SgemmEx", m, n, k);
}
GHOST cublasStatus_t cublasSgemm_v2(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                                    const float*, const float*, int, const float*, int, const float*, float*, int) {
    return product("Sgemm", m, n, k);
}
GHOST cublasStatus_t cublasDgemm_v2(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                                    const double*, const double*, int, const double*, int, const double*, double*,
                                    int) {
    return product("Dgemm", m, n, k);
}
GHOST cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n,
                                               int k, const float*, const float*, int, long long, const float*, int,
                                               long long, const float*, float*, int, long long, int) {
    return product("SgemmStridedBatched", m, n, k);
}
GHOST cublasStatus_t cublasDgemmStridedBatched(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n,
                                               int k, const double*, const double*, int, long long, const double*,
                                               int, long long, const double*, double*, int, long long, int) {
    return product("DgemmStridedBatched", m, n, k);
}
GHOST cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n,
                                                int k, const void*, const void*, cudaDataType, int, long long,
                                                const void*, cudaDataType, int, long long, const void*, void*,
                                                cudaDataType, int, long long, int, cublasComputeType_t,
                                                cublasGemmAlgo_t) {
    return product("GemmStridedBatchedEx", m, n, k);
}
GHOST cublasStatus_t cublasSgemv_v2(cublasHandle_t, cublasOperation_t, int m, int n, const float*, const float*, int,
                                    const float*, int, const float*, float*, int) {
    return product("Sgemv", m, 1, n);
}
GHOST cublasStatus_t cublasDgemv_v2(cublasHandle_t, cublasOperation_t, int m, int n, const double*, const double*,
                                    int, const double*, int, const double*, double*, int) {
    return product("Dgemv", m, 1, n);
}
GHOST cublasStatus_t cublasSdot_v2(cublasHandle_t, int n, const float*, int, const float*, int, float*) {
    return product("Sdot", 1, 1, n);
}
GHOST cublasStatus_t cublasDotEx(cublasHandle_t, int n, const void*, cudaDataType, int, const void*, cudaDataType,
                                 int, void*, cudaDataType, cudaDataType) {
    return product("DotEx", 1, 1, n);
}
GHOST cublasStatus_t cublasStrsm_v2(cublasHandle_t, cublasSideMode_t, cublasFillMode_t, cublasOperation_t,
                                    cublasDiagType_t, int m, int n, const float*, const float*, int, float*, int) {
    return product("Strsm", m, n, m);
}
GHOST cublasStatus_t cublasStrsmBatched(cublasHandle_t, cublasSideMode_t, cublasFillMode_t, cublasOperation_t,
                                        cublasDiagType_t, int m, int n, const float*, const float* const*, int,
                                        float* const*, int, int) {
    return product("StrsmBatched", m, n, m);
}

// ---- cuBLASLt
GHOST cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    *handle = static_cast<cublasLtHandle_t>(calloc(1, 256));
    return CUBLAS_STATUS_SUCCESS;
}
GHOST cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return free(handle), CUBLAS_STATUS_SUCCESS; }
GHOST cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                                    cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                    cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                                                    cublasLtMatmulHeuristicResult_t* found, int* count) {
    memset(found, 0, sizeof *found);
    found->state = CUBLAS_STATUS_SUCCESS;
    *count = 1;
    return CUBLAS_STATUS_SUCCESS;
}
GHOST cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t*,
                                                          cublasLtMatmulAlgoConfigAttributes_t, void* out,
                                                          size_t bytes, size_t* written) {
    memset(out, 0, bytes);
    if (written) *written = bytes;
    return CUBLAS_STATUS_SUCCESS;
}
// Of cuBLAS 13.2: Transformer Engine binds its names as it is loaded, and so can't be loaded beside the 13.1 of
// torch's packages until 2.17 binds them as they are called.
GHOST cublasStatus_t cublasLtGroupedMatrixLayoutInit_internal(cublasLtMatrixLayout_t, size_t, cudaDataType, int,
                                                              const void*, const void*, const void*) {
    ghost::refuse("cublasLtGroupedMatrixLayoutInit");
    return CUBLAS_STATUS_NOT_SUPPORTED;
}
GHOST cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void*, const void*,
                                    cublasLtMatrixLayout_t a, const void*, cublasLtMatrixLayout_t, const void*,
                                    const void*, cublasLtMatrixLayout_t c, void*, cublasLtMatrixLayout_t,
                                    const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t) {
    long rows = layout_attribute(c, CUBLASLT_MATRIX_LAYOUT_ROWS), columns = layout_attribute(c, CUBLASLT_MATRIX_LAYOUT_COLS);
    long elements = layout_attribute(a, CUBLASLT_MATRIX_LAYOUT_ROWS) * layout_attribute(a, CUBLASLT_MATRIX_LAYOUT_COLS);
    return product("LtMatmul", rows, columns, rows ? elements / rows : 0);
}

// ---- cuDNN: handles, and graphs by its backend's descriptors
GHOST cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
    *handle = static_cast<cudnnHandle_t>(calloc(1, 256));
    return CUDNN_STATUS_SUCCESS;
}
GHOST cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) { return free(handle), CUDNN_STATUS_SUCCESS; }
GHOST cudnnStatus_t cudnnSetStream(cudnnHandle_t, cudaStream_t) { return CUDNN_STATUS_SUCCESS; }
GHOST cudnnStatus_t cudnnGetStream(cudnnHandle_t, cudaStream_t* stream) {
    return *stream = nullptr, CUDNN_STATUS_SUCCESS;
}
GHOST cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t* out) {
    *out = reinterpret_cast<cudnnBackendDescriptor_t>(new Descriptor{type});
    return CUDNN_STATUS_SUCCESS;
}
GHOST cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
    delete reinterpret_cast<Descriptor*>(descriptor);
    return CUDNN_STATUS_SUCCESS;
}
GHOST cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t, cudnnBackendAttributeName_t,
                                             cudnnBackendAttributeType_t, int64_t, const void*) {
    return CUDNN_STATUS_SUCCESS;
}
GHOST cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t) { return CUDNN_STATUS_SUCCESS; }
// One engine and one configuration of it for every graph, which want no workspace and have no notes.
GHOST cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t, cudnnBackendAttributeName_t name,
                                             cudnnBackendAttributeType_t type, int64_t wanted, int64_t* count,
                                             void* out) {
    int64_t found = 1;
    switch (type) {
        case CUDNN_TYPE_BACKEND_DESCRIPTOR:
            found = name == CUDNN_ATTR_ENGINECFG_KNOB_CHOICES ? 0 : 1;
            break;
        case CUDNN_TYPE_INT64:
            if (out && wanted > 0) memset(out, 0, sizeof(int64_t) * wanted);
            break;
        case CUDNN_TYPE_INT32:
            if (out && wanted > 0) memset(out, 0, sizeof(int32_t) * wanted);
            break;
        case CUDNN_TYPE_NUMERICAL_NOTE:
        case CUDNN_TYPE_BEHAVIOR_NOTE:
        case CUDNN_TYPE_KNOB_TYPE:
            found = 0;
            break;
        default:
            break;
    }
    if (count) *count = found;
    return CUDNN_STATUS_SUCCESS;
}
GHOST cudnnStatus_t cudnnBackendExecute(cudnnHandle_t, cudnnBackendDescriptor_t, cudnnBackendDescriptor_t) {
    return ghost::note("cudnn:execute"), CUDNN_STATUS_SUCCESS;
}

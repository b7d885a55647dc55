// The CUDA runtime: kernels, which are registered, checked, counted and never executed, and driver functions by name.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "runtime.h"

using gpu::Kernel;

extern "C" void emulated_gpu_register(const void* host_function, const char* name);

extern "C" {

// ---- Kernels ----

void** __cudaRegisterFatBinary(void*) { static void* handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
    emulated_gpu_register(host, name);
}

struct Configuration { dim3 grid, block; std::size_t shared; void* stream; };
static thread_local std::vector<Configuration> configurations;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared, CUstream_st* stream) {
    configurations.push_back({grid, block, shared, stream});
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared, void* stream) {
    Configuration top = configurations.back();
    configurations.pop_back();
    *grid = top.grid;
    *block = top.block;
    *shared = top.shared;
    *static_cast<void**>(stream) = top.stream;
    return cudaSuccess;
}

static cudaError_t launched(Kernel* kernel, dim3 grid, dim3 block, std::size_t shared, cudaStream_t stream) {
    std::uint64_t threads = std::uint64_t(block.x) * block.y * block.z;
    if (!threads || threads > 1024 || !grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535
        || shared > std::size_t(gpu::model().shared_kib) << 10) {
        if (getenv("EMULATED_GPU_VERBOSE"))
            fprintf(stderr, "emulated GPU: invalid launch of %s: grid %u %u %u, block %u %u %u, shared %zu\n", kernel->name, grid.x, grid.y,
                    grid.z, block.x, block.y, block.z, shared);
        return failed(cudaErrorInvalidConfiguration);
    }
    return cudaError_t(gpu::launch(kernel, stream));
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
    *kernel = reinterpret_cast<cudaKernel_t>(gpu::kernel_of(host));
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, std::size_t shared, cudaStream_t stream) {
    return launched(reinterpret_cast<Kernel*>(kernel), grid, block, shared, stream);
}
cudaError_t cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void**, std::size_t shared, cudaStream_t stream) {
    return launched(gpu::kernel_of(host), grid, block, shared, stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void* host, dim3 grid, dim3 block, void**, std::size_t shared, cudaStream_t stream) {
    return launched(gpu::kernel_of(host), grid, block, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* host, void**) {
    return launched(gpu::kernel_of(host), how->gridDim, how->blockDim, how->dynamicSmemBytes, how->stream);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    memset(attributes, 0, sizeof *attributes);
    // The newest binary that PyTorch ships and the GPU can run.
    int runs = gpu::model().major * 10 + gpu::model().minor, built = 75;
    for (int one : {75, 80, 86, 90, 100, 120}) if (one <= runs) built = one;
    attributes->binaryVersion = attributes->ptxVersion = built;
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->maxDynamicSharedSizeBytes = 48 << 10;
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int threads, std::size_t shared, unsigned) {
    const gpu::Model& model = gpu::model();
    int by_threads = (model.major == 7 ? 1024 : 1536) / std::max(threads, 1);
    int by_shared = shared ? int((std::size_t(model.shared_kib) << 10) / (shared + 1024)) : 16;
    *blocks = std::max(1, std::min({by_threads, by_shared, 16}));
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* host, int threads, std::size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, host, threads, shared, 0);
}

// ---- Driver functions by name ----

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
    Dl_info here;
    dladdr(reinterpret_cast<void*>(&cudaGetDriverEntryPointByVersion), &here);
    static void* const own = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *function = nullptr;
    for (const char* suffix : {"_v3", "_v2", ""})
        if (!*function) *function = dlsym(own, (std::string(symbol) + suffix).c_str());
    if (status) *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    if (!*function && getenv("EMULATED_GPU_VERBOSE")) fprintf(stderr, "emulated GPU: no %s\n", symbol);
    return cudaSuccess;
}

}  // extern "C"

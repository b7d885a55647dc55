// The part of the CUDA driver that PyTorch and Triton look up by name: virtual memory (expandable segments), device
// properties, contexts and modules.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#include "gpu.h"

void note_range(std::uintptr_t at, std::size_t bytes);
void forget_range(std::uintptr_t at);
bool range_of(std::uintptr_t at, std::uintptr_t* start, std::size_t* bytes);

// Physical device memory, released once it has neither a handle nor a mapping.
struct Piece { std::size_t bytes; int references; };
static std::mutex lock;
static std::map<CUdeviceptr, Piece*>& mapped() { static auto* all = new std::map<CUdeviceptr, Piece*>(); return *all; }
static void release(Piece* piece) {
    if (--piece->references) return;
    gpu::unreserve(piece->bytes);
    delete piece;
}
static CUcontext const CONTEXT = reinterpret_cast<CUcontext>(0x1000);

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { *version = 13000; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* number) { *number = 1; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int) { *device = 0; return CUDA_SUCCESS; }
CUresult cuDeviceGetName(char* name, int length, CUdevice) { snprintf(name, length, "%s", gpu::model().name); return CUDA_SUCCESS; }
CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice) { memcpy(uuid->bytes, gpu::uuid(), 16); return CUDA_SUCCESS; }
CUresult cuDeviceTotalMem(std::size_t* bytes, CUdevice) { *bytes = gpu::usable_bytes(); return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    *value = 1;
    if (attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) return CUDA_SUCCESS;
    // The runtime's attributes have the driver's numbers.
    return CUresult(cudaDeviceGetAttribute(value, cudaDeviceAttr(attribute), device));
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) { if (flags) *flags = 0; *active = 1; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { gpu::make_context(); *context = CONTEXT; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext* context) { *context = CONTEXT; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice* device) { *device = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
// Triton raises the stack limit before it loads a kernel, and reads it back.
static std::map<CUlimit, std::size_t>& limits() { static auto* all = new std::map<CUlimit, std::size_t>{{CU_LIMIT_STACK_SIZE, 1024}}; return *all; }
CUresult cuCtxSetLimit(CUlimit limit, std::size_t value) {
    std::lock_guard<std::mutex> guard(lock);
    limits()[limit] = value;
    return CUDA_SUCCESS;
}
CUresult cuCtxGetLimit(std::size_t* value, CUlimit limit) {
    std::lock_guard<std::mutex> guard(lock);
    *value = limits()[limit];
    return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent(CUcontext* context) { if (context) *context = CONTEXT; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char** text) { *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : error ? "an error" : "no error"; return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult error, const char** text) { *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : error ? "CUDA_ERROR" : "CUDA_SUCCESS"; return CUDA_SUCCESS; }

CUresult cuMemGetAllocationGranularity(std::size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) { *bytes = std::size_t(2) << 20; return CUDA_SUCCESS; }
CUresult cuMemAddressReserve(CUdeviceptr* at, std::size_t bytes, std::size_t, CUdeviceptr, unsigned long long) {
    void* found = gpu::allocate_address(bytes);
    if (!found) return CUDA_ERROR_OUT_OF_MEMORY;
    *at = reinterpret_cast<CUdeviceptr>(found);
    note_range(*at, bytes);
    return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr at, std::size_t bytes) {
    forget_range(at);
    gpu::free_address(reinterpret_cast<void*>(at), bytes);
    return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t bytes, const CUmemAllocationProp*, unsigned long long) {
    if (!gpu::reserve(bytes)) { gpu::count(gpu::OUT_OF_MEMORY); return CUDA_ERROR_OUT_OF_MEMORY; }
    gpu::count(gpu::MALLOC);
    *handle = reinterpret_cast<CUmemGenericAllocationHandle>(new Piece{bytes, 1});
    return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    std::lock_guard<std::mutex> guard(lock);
    release(reinterpret_cast<Piece*>(handle));
    return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr at, std::size_t, std::size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
    std::lock_guard<std::mutex> guard(lock);
    Piece* piece = reinterpret_cast<Piece*>(handle);
    piece->references++;
    mapped()[at] = piece;
    return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr at, std::size_t bytes) {
    std::lock_guard<std::mutex> guard(lock);
    auto from = mapped().lower_bound(at), to = mapped().lower_bound(at + bytes);
    for (auto one = from; one != to; ++one) { release(one->second); gpu::count(gpu::FREE); }
    mapped().erase(from, to);
    return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr, std::size_t, const CUmemAccessDesc*, std::size_t) { return CUDA_SUCCESS; }
CUresult cuMemGetAddressRange(CUdeviceptr* start, std::size_t* bytes, CUdeviceptr at) {
    std::uintptr_t found;
    std::size_t size;
    if (!range_of(at, &found, &size)) return CUDA_ERROR_NOT_FOUND;
    if (start) *start = found;
    if (bytes) *bytes = size;
    return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr at) {
    std::uintptr_t start;
    std::size_t bytes;
    if (!range_of(at, &start, &bytes)) return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR) *static_cast<CUdeviceptr*>(value) = start;
    else if (attribute == CU_POINTER_ATTRIBUTE_RANGE_SIZE) *static_cast<std::size_t*>(value) = bytes;
    else if (attribute == CU_POINTER_ATTRIBUTE_BUFFER_ID) *static_cast<unsigned long long*>(value) = start;
    else *static_cast<unsigned*>(value) = 0;
    return CUDA_SUCCESS;
}

// Kernels that are compiled at run time (NVRTC's and Triton's) are named and counted, never executed.
CUresult cuModuleLoadData(CUmodule* module, const void*) { *module = reinterpret_cast<CUmodule>(0x2000); return CUDA_SUCCESS; }
CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) { return cuModuleLoadData(module, image); }
CUresult cuModuleLoad(CUmodule* module, const char*) { return cuModuleLoadData(module, nullptr); }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) { *function = reinterpret_cast<CUfunction>(gpu::kernel_named(name)); return CUDA_SUCCESS; }
CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream stream, void**, void**) {
    return CUresult(gpu::launch(reinterpret_cast<gpu::Kernel*>(function), stream));
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* how, CUfunction function, void**, void**) {
    return CUresult(gpu::launch(reinterpret_cast<gpu::Kernel*>(function), how->hStream));
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, std::size_t) { *blocks = 2; return CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
    return CUDA_SUCCESS;
}

}  // extern "C"

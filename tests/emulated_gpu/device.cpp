// The CUDA runtime: the properties of the one device.
#include <cstdio>
#include <cstring>

#include "runtime.h"

extern "C" {

cudaError_t cudaDriverGetVersion(int* version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* number) { *number = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
    if (device != 0) return failed(cudaErrorInvalidDevice);
    gpu::make_context();
    return cudaSuccess;
}
cudaError_t cudaDeviceReset() { return cudaSuccess; }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* prop, int device) {
    if (device != 0) return failed(cudaErrorInvalidDevice);
    const gpu::Model& model = gpu::model();
    memset(prop, 0, sizeof *prop);
    snprintf(prop->name, sizeof prop->name, "%s", model.name);
    memcpy(prop->uuid.bytes, gpu::uuid(), 16);
    prop->totalGlobalMem = gpu::usable_bytes();
    prop->sharedMemPerBlock = 48 << 10;
    prop->sharedMemPerMultiprocessor = std::size_t(model.shared_kib) << 10;
    prop->sharedMemPerBlockOptin = std::size_t(model.shared_kib - (model.major >= 8 ? 1 : 0)) << 10;
    prop->reservedSharedMemPerBlock = 1024;
    prop->regsPerBlock = prop->regsPerMultiprocessor = 65536;
    prop->warpSize = 32;
    prop->memPitch = 2147483647;
    prop->maxThreadsPerBlock = 1024;
    prop->maxThreadsDim[0] = prop->maxThreadsDim[1] = 1024;
    prop->maxThreadsDim[2] = 64;
    prop->maxGridSize[0] = 2147483647;
    prop->maxGridSize[1] = prop->maxGridSize[2] = 65535;
    prop->totalConstMem = 65536;
    prop->major = model.major;
    prop->minor = model.minor;
    prop->textureAlignment = 512;
    prop->texturePitchAlignment = 32;
    prop->multiProcessorCount = model.processors;
    prop->canMapHostMemory = prop->concurrentKernels = prop->unifiedAddressing = prop->managedMemory = 1;
    prop->asyncEngineCount = 2;
    prop->memoryBusWidth = model.bus_bits;
    prop->l2CacheSize = model.cache_kib << 10;
    prop->maxThreadsPerMultiProcessor = model.major == 7 ? 1024 : 1536;
    prop->maxBlocksPerMultiProcessor = model.major == 8 && model.minor == 9 ? 24 : 16;
    prop->streamPrioritiesSupported = prop->globalL1CacheSupported = prop->localL1CacheSupported = 1;
    prop->concurrentManagedAccess = prop->computePreemptionSupported = prop->cooperativeLaunch = 1;
    prop->canUseHostPointerForRegisteredMem = prop->hostRegisterSupported = prop->memoryPoolsSupported = 1;
    prop->pciBusID = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    static const cudaDeviceProp prop = [] { cudaDeviceProp made; cudaGetDeviceProperties(&made, 0); return made; }();
    if (device != 0) return failed(cudaErrorInvalidDevice);
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock: *value = prop.maxThreadsPerBlock; break;
        case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
        case cudaDevAttrMaxBlockDimZ: *value = 64; break;
        case cudaDevAttrMaxGridDimX: *value = prop.maxGridSize[0]; break;
        case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = int(prop.sharedMemPerBlock); break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(prop.sharedMemPerBlockOptin); break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = int(prop.sharedMemPerMultiprocessor); break;
        case cudaDevAttrWarpSize: *value = 32; break;
        case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
        case cudaDevAttrMultiProcessorCount: *value = prop.multiProcessorCount; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = prop.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrMaxBlocksPerMultiprocessor: *value = prop.maxBlocksPerMultiProcessor; break;
        case cudaDevAttrComputeCapabilityMajor: *value = prop.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = prop.minor; break;
        case cudaDevAttrL2CacheSize: *value = prop.l2CacheSize; break;
        case cudaDevAttrGlobalMemoryBusWidth: *value = prop.memoryBusWidth; break;
        case cudaDevAttrClockRate: *value = 1777000; break;
        case cudaDevAttrMemoryClockRate: *value = 7501000; break;
        case cudaDevAttrCooperativeLaunch: case cudaDevAttrUnifiedAddressing: case cudaDevAttrManagedMemory:
        case cudaDevAttrConcurrentManagedAccess: case cudaDevAttrConcurrentKernels: case cudaDevAttrCanMapHostMemory:
        case cudaDevAttrMemoryPoolsSupported: case cudaDevAttrHostRegisterSupported:
        case cudaDevAttrCanUseHostPointerForRegisteredMem: case cudaDevAttrStreamPrioritiesSupported:
            *value = 1; break;
        default: *value = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int) { snprintf(id, length, "00000000:01:00.0"); return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 0; return cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return failed(cudaErrorPeerAccessUnsupported); }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return cudaSuccess; }

}  // extern "C"

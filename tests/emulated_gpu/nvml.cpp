// NVML, which reports on GPUs without a CUDA context. Types are declared as in its documentation.
#include <cstdio>
#include <cstring>

#include "gpu.h"

enum { OK = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7 };
struct Memory { unsigned long long total, free, used; };
struct MemoryV2 { unsigned version; unsigned long long total, reserved, free, used; };
struct Process { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; };
struct Rates { unsigned gpu, memory; };
static void* const DEVICE = reinterpret_cast<void*>(0x3000);

extern "C" {

int nvmlInit_v2() { return OK; }
int nvmlInit() { return OK; }
int nvmlInitWithFlags(unsigned) { return OK; }
int nvmlShutdown() { return OK; }
const char* nvmlErrorString(int error) { return error == OK ? "Success" : error == NOT_SUPPORTED ? "Not Supported" : "Error"; }
int nvmlSystemGetDriverVersion(char* text, unsigned length) { snprintf(text, length, "580.65.06"); return OK; }
int nvmlSystemGetNVMLVersion(char* text, unsigned length) { snprintf(text, length, "13.580.65.06"); return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = 13000; return OK; }
int nvmlSystemGetCudaDriverVersion(int* version) { *version = 13000; return OK; }
int nvmlSystemGetProcessName(unsigned pid, char* text, unsigned length) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE* file = fopen(path, "r");
    if (!file) return NOT_FOUND;
    std::size_t read = fread(text, 1, length - 1, file);
    text[read] = 0;
    fclose(file);
    return OK;
}
int nvmlDeviceGetCount_v2(unsigned* number) { *number = 1; return OK; }
int nvmlDeviceGetCount(unsigned* number) { *number = 1; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) { *device = DEVICE; return index ? 2 : OK; }
int nvmlDeviceGetHandleByIndex(unsigned index, void** device) { return nvmlDeviceGetHandleByIndex_v2(index, device); }
int nvmlDeviceGetHandleByUUID(const char*, void** device) { *device = DEVICE; return OK; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { *device = DEVICE; return OK; }
int nvmlDeviceGetIndex(void*, unsigned* index) { *index = 0; return OK; }
int nvmlDeviceGetName(void*, char* text, unsigned length) { snprintf(text, length, "%s", gpu::model().name); return OK; }
int nvmlDeviceGetUUID(void*, char* text, unsigned length) {
    const unsigned char* u = gpu::uuid();
    snprintf(text, length, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1], u[2], u[3], u[4],
             u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
    return OK;
}
int nvmlDeviceGetCudaComputeCapability(void*, int* major, int* minor) { *major = gpu::model().major; *minor = gpu::model().minor; return OK; }
int nvmlDeviceGetMemoryInfo(void*, Memory* memory) {
    memory->total = gpu::board_bytes();
    memory->free = gpu::free_bytes();
    memory->used = memory->total - memory->free;
    return OK;
}
int nvmlDeviceGetMemoryInfo_v2(void*, MemoryV2* memory) {
    memory->total = gpu::board_bytes();
    memory->free = gpu::free_bytes();
    memory->reserved = gpu::board_bytes() - gpu::usable_bytes();
    memory->used = memory->total - memory->free - memory->reserved;
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* number, Process* processes) {
    gpu::Usage found[256];
    unsigned count = unsigned(gpu::usages(found, 256)), capacity = *number;
    *number = count;
    if (capacity < count) return TOO_SMALL;
    for (unsigned index = 0; index < count; index++) processes[index] = Process{unsigned(found[index].pid), found[index].bytes, ~0u, ~0u};
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses(void* device, unsigned* number, Process* processes) { return nvmlDeviceGetComputeRunningProcesses_v3(device, number, processes); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(void*, unsigned* number, Process*) { *number = 0; return OK; }
int nvmlDeviceGetUtilizationRates(void*, Rates* rates) { *rates = Rates{0, 0}; return OK; }
int nvmlDeviceGetTemperature(void*, int, unsigned* degrees) { *degrees = 40; return OK; }
int nvmlDeviceGetPowerUsage(void*, unsigned* milliwatts) { *milliwatts = 15000; return OK; }

}  // extern "C"

// Shared declarations of the emulated GPU: its properties, its memory, its kernels and its counters.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace gpu {

// A GPU model, as the driver and NVML describe it.
struct Model {
    const char* key;   // the value of EMULATED_GPU that selects it
    const char* name;  // the name that the driver reports
    int major, minor;  // compute capability
    int processors;    // streaming multiprocessors
    int shared_kib;    // shared memory of a multiprocessor; from Ampere on a block can use 1 KiB less
    int cache_kib;     // L2 cache
    int bus_bits;
    int board_mib;     // the advertised memory, which NVML reports
    int usable_mib;    // what CUDA makes available to programs
};

const Model& model();
std::size_t usable_bytes();   // what CUDA makes available; EMULATED_GPU_MIB overrides the model's
std::size_t board_bytes();    // the total that NVML reports
const unsigned char* uuid();  // 16 bytes

// Device memory. Addresses are reserved but not accessible: a host that dereferences one crashes, as with a real GPU.
bool reserve(std::size_t bytes);   // counts bytes against the capacity; false if they do not fit
void unreserve(std::size_t bytes);
void* allocate_address(std::size_t bytes);
void free_address(void* address, std::size_t bytes);
std::size_t free_bytes();          // counted over all processes that share this emulated GPU
void make_context();               // takes the memory of a CUDA context, once per process
struct Usage { int pid; std::uint64_t bytes; };
int usages(Usage* found, int capacity);  // processes with a context; returns how many there are

// Counters since the process started.
enum Count { LAUNCH, LIBRARY, CONVOLUTION, COPY_TO_DEVICE, COPY_TO_HOST, COPY_ON_DEVICE, FILL, GRAPH_LAUNCH, IN_GRAPHS,
             MALLOC, FREE, PINNED, SYNCHRONIZE, EVENT, OUT_OF_MEMORY, CAPTURE_VIOLATION, PAGEABLE_CAPTURED, COUNTS };
extern std::atomic<std::uint64_t> counts[COUNTS];
inline void count(Count which, std::uint64_t times = 1) {
    counts[which].fetch_add(times, std::memory_order_relaxed);
}

// A device function. Its address serves as cudaKernel_t and CUfunction.
struct Kernel {
    const char* name;
    std::atomic<std::uint64_t> launches{0};
    explicit Kernel(const char* name) : name(name) {}
};
Kernel* kernel_of(const void* host_function);
Kernel* kernel_named(const char* name);
int launch(Kernel* kernel, void* stream);  // returns a cudaError_t

// Counts a kernel that cuBLAS or cuDNN would launch, and records it if the stream is being captured.
void library_call(Count which);

// Fills host memory with the value that a copy from the device delivers (readback.cpp).
void fill_readback(void* host, std::size_t bytes);

}  // namespace gpu

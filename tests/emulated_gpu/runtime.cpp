// The CUDA runtime: memory, streams, captures, graphs and events.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "runtime.h"

using gpu::count;
using gpu::Kernel;

// ---- Errors: each thread keeps its last one until cudaGetLastError ----

static thread_local cudaError_t last_error = cudaSuccess;
cudaError_t failed(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

static const std::pair<cudaError_t, std::pair<const char*, const char*>> ERRORS[] = {
    {cudaSuccess, {"cudaSuccess", "no error"}},
    {cudaErrorInvalidValue, {"cudaErrorInvalidValue", "invalid argument"}},
    {cudaErrorMemoryAllocation, {"cudaErrorMemoryAllocation", "out of memory"}},
    {cudaErrorInvalidDevice, {"cudaErrorInvalidDevice", "invalid device ordinal"}},
    {cudaErrorInvalidResourceHandle, {"cudaErrorInvalidResourceHandle", "invalid resource handle"}},
    {cudaErrorInvalidConfiguration, {"cudaErrorInvalidConfiguration", "invalid configuration argument"}},
    {cudaErrorStreamCaptureIsolation, {"cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"}},
    {cudaErrorIllegalState, {"cudaErrorIllegalState", "the operation cannot be performed in the present state"}},
    {cudaErrorNotReady, {"cudaErrorNotReady", "device not ready"}},
    {cudaErrorNotSupported, {"cudaErrorNotSupported", "operation not supported"}},
    {cudaErrorStreamCaptureUnsupported, {"cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"}},
    {cudaErrorStreamCaptureInvalidated, {"cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"}},
    {cudaErrorStreamCaptureUnjoined, {"cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"}},
    {cudaErrorStreamCaptureWrongThread, {"cudaErrorStreamCaptureWrongThread", "attempt to terminate a thread-local capture sequence from another thread"}},
    {cudaErrorStreamCaptureImplicit, {"cudaErrorStreamCaptureImplicit", "operation would make the legacy stream depend on a capturing blocking stream"}},
    {cudaErrorCapturedEvent, {"cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"}},
    {cudaErrorPeerAccessUnsupported, {"cudaErrorPeerAccessUnsupported", "peer access is not supported between these two devices"}},
};

// ---- Captures ----

struct Stream;
struct Capture;
struct Graph {
    std::unordered_map<Kernel*, std::uint64_t> kernels;
    std::uint64_t nodes = 0;
    std::uint64_t launches = 0;
};
struct Capture {
    unsigned long long id;
    Graph* graph;
    Stream* origin;
    cudaStreamCaptureMode mode;
    std::thread::id owner;
    bool invalid = false;
};
struct Stream {
    unsigned flags = 0;
    int priority = 0;
    Capture* capture = nullptr;
};
struct Event {
    std::chrono::steady_clock::time_point at{};
    bool recorded = false;
    bool timed = true;
    Capture* capture = nullptr;
    unsigned long long capture_id = 0;
};

static std::recursive_mutex lock;  // of streams and captures
static Stream legacy_stream;
static Stream thread_stream;
static std::set<Stream*>& streams() { static auto* all = new std::set<Stream*>(); return *all; }
static std::set<Capture*>& captures() { static auto* all = new std::set<Capture*>(); return *all; }
static std::atomic<int> capturing{0};
static unsigned long long next_capture = 1;
static thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

static Stream* of(cudaStream_t stream) {
    if (stream == nullptr || stream == cudaStreamLegacy) return &legacy_stream;
    if (stream == cudaStreamPerThread) return &thread_stream;
    return reinterpret_cast<Stream*>(stream);
}

static cudaError_t violation(Capture* capture, const char* what, cudaError_t error = cudaErrorStreamCaptureUnsupported) {
    capture->invalid = true;
    count(gpu::CAPTURE_VIOLATION);
    if (getenv("EMULATED_GPU_VERBOSE")) fprintf(stderr, "emulated GPU: %s during a stream capture\n", what);
    return failed(error);
}

// Checks an API call that CUDA forbids during a capture, depending on the thread's and the capture's mode.
static cudaError_t unsafe(const char* what) {
    if (!capturing.load(std::memory_order_relaxed)) return cudaSuccess;
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
    for (Capture* one : captures()) {
        bool mine = one->owner == std::this_thread::get_id() && one->mode != cudaStreamCaptureModeRelaxed;
        bool others = one->owner != std::this_thread::get_id() && one->mode == cudaStreamCaptureModeGlobal
            && thread_mode == cudaStreamCaptureModeGlobal;
        if (mine || others) return violation(one, what);
    }
    return cudaSuccess;
}

// Puts work on a stream, or into the graph of its capture.
static cudaError_t enqueue(cudaStream_t stream, Kernel* kernel, Capture** into = nullptr) {
    if (!capturing.load(std::memory_order_relaxed)) return cudaSuccess;
    std::lock_guard<std::recursive_mutex> guard(lock);
    Stream* on = of(stream);
    if (!on->capture) {
        if (on == &legacy_stream)
            for (Capture* one : captures())
                if (!(one->origin->flags & cudaStreamNonBlocking))
                    return violation(one, "work on the legacy stream", cudaErrorStreamCaptureImplicit);
        return cudaSuccess;
    }
    if (on->capture->invalid) return failed(cudaErrorStreamCaptureInvalidated);
    on->capture->graph->nodes++;
    if (kernel) { on->capture->graph->kernels[kernel]++; on->capture->graph->launches++; }
    if (into) *into = on->capture;
    return cudaSuccess;
}

static thread_local cudaStream_t latest_stream = nullptr;  // of the last kernel: cuBLAS and cuDNN use the same stream

namespace gpu {
int launch(Kernel* kernel, void* stream) {
    make_context();
    latest_stream = static_cast<cudaStream_t>(stream);
    Capture* into = nullptr;
    cudaError_t error = enqueue(latest_stream, kernel, &into);
    if (error != cudaSuccess) return error;
    if (!into) {
        count(LAUNCH);
        if (kernel) kernel->launches.fetch_add(1, std::memory_order_relaxed);
    }
    return cudaSuccess;
}

void library_call(Count which) {
    make_context();
    Capture* into = nullptr;
    static Kernel* const library = kernel_named("(library)");
    if (enqueue(latest_stream, library, &into) == cudaSuccess && !into) count(which);
}
}  // namespace gpu

// ---- Memory: the kind of each address ----

enum Kind { DEVICE, PINNED, MANAGED, REGISTERED };
struct Block { std::size_t bytes; std::size_t counted; Kind kind; };
static std::mutex block_lock;
static std::map<std::uintptr_t, Block>& blocks() { static auto* all = new std::map<std::uintptr_t, Block>(); return *all; }

static bool find(const void* at, Block* found, std::uintptr_t* start = nullptr) {
    std::lock_guard<std::mutex> guard(block_lock);
    auto address = reinterpret_cast<std::uintptr_t>(at);
    auto next = blocks().upper_bound(address);
    if (next == blocks().begin()) return false;
    --next;
    if (address >= next->first + next->second.bytes) return false;
    *found = next->second;
    if (start) *start = next->first;
    return true;
}
static bool on_device(const void* at) { Block block; return find(at, &block) && block.kind == DEVICE; }
static bool pageable(const void* at) { Block block; return !find(at, &block); }

// Called by driver.cpp, whose virtual memory ranges are device memory too.
void note_range(std::uintptr_t at, std::size_t bytes) {
    std::lock_guard<std::mutex> guard(block_lock);
    blocks()[at] = Block{bytes, 0, DEVICE};
}
void forget_range(std::uintptr_t at) {
    std::lock_guard<std::mutex> guard(block_lock);
    blocks().erase(at);
}
bool range_of(std::uintptr_t at, std::uintptr_t* start, std::size_t* bytes) {
    Block block;
    if (!find(reinterpret_cast<void*>(at), &block, start)) return false;
    *bytes = block.bytes;
    return true;
}

static const std::size_t LARGE = std::size_t(1) << 20;
static const std::size_t PAGE = std::size_t(2) << 20;

extern "C" {

cudaError_t cudaGetLastError() { cudaError_t error = last_error; last_error = cudaSuccess; return error; }
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t error) {
    for (auto& one : ERRORS) if (one.first == error) return one.second.first;
    return "cudaErrorUnknown";
}
const char* cudaGetErrorString(cudaError_t error) {
    for (auto& one : ERRORS) if (one.first == error) return one.second.second;
    return "unknown error";
}

// ---- Waiting for the device ----

cudaError_t cudaDeviceSynchronize() {
    count(gpu::SYNCHRONIZE);
    if (capturing.load()) {
        std::lock_guard<std::recursive_mutex> guard(lock);
        for (Capture* one : captures()) return violation(one, "cudaDeviceSynchronize");
    }
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
    gpu::make_context();
    *free = gpu::free_bytes();
    *total = gpu::usable_bytes();
    return cudaSuccess;
}

// ---- Memory ----

cudaError_t cudaMalloc(void** at, std::size_t bytes) {
    *at = nullptr;
    if (cudaError_t error = unsafe("cudaMalloc")) return error;
    if (!bytes) return cudaSuccess;
    std::size_t counted = bytes >= LARGE ? (bytes + PAGE - 1) / PAGE * PAGE : (bytes + 511) / 512 * 512;
    if (!gpu::reserve(counted)) { count(gpu::OUT_OF_MEMORY); return failed(cudaErrorMemoryAllocation); }
    void* found = gpu::allocate_address(counted);
    if (!found) { gpu::unreserve(counted); return failed(cudaErrorMemoryAllocation); }
    { std::lock_guard<std::mutex> guard(block_lock); blocks()[reinterpret_cast<std::uintptr_t>(found)] = Block{counted, counted, DEVICE}; }
    count(gpu::MALLOC);
    *at = found;
    return cudaSuccess;
}

cudaError_t cudaFree(void* at) {
    gpu::make_context();  // cudaFree(nullptr) is the customary way to create a context
    if (!at) return cudaSuccess;
    if (cudaError_t error = unsafe("cudaFree")) return error;
    Block block;
    {
        std::lock_guard<std::mutex> guard(block_lock);
        auto found = blocks().find(reinterpret_cast<std::uintptr_t>(at));
        if (found == blocks().end()) return failed(cudaErrorInvalidValue);
        block = found->second;
        blocks().erase(found);
    }
    count(gpu::FREE);
    if (block.kind == MANAGED) { free(at); return cudaSuccess; }
    gpu::free_address(at, block.counted);
    gpu::unreserve(block.counted);
    return cudaSuccess;
}

static cudaError_t host_memory(void** at, std::size_t bytes, Kind kind) {
    gpu::make_context();
    if (posix_memalign(at, 4096, std::max<std::size_t>(bytes, 1))) return failed(cudaErrorMemoryAllocation);
    std::lock_guard<std::mutex> guard(block_lock);
    blocks()[reinterpret_cast<std::uintptr_t>(*at)] = Block{std::max<std::size_t>(bytes, 1), 0, kind};
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** at, std::size_t bytes, unsigned) {
    if (cudaError_t error = unsafe("cudaHostAlloc")) return error;
    count(gpu::PINNED);
    return host_memory(at, bytes, PINNED);
}
cudaError_t cudaMallocHost(void** at, std::size_t bytes) { return cudaHostAlloc(at, bytes, 0); }
cudaError_t cudaMallocManaged(void** at, std::size_t bytes, unsigned) { return host_memory(at, bytes, MANAGED); }
cudaError_t cudaFreeHost(void* at) {
    if (!at) return cudaSuccess;
    if (cudaError_t error = unsafe("cudaFreeHost")) return error;
    std::lock_guard<std::mutex> guard(block_lock);
    if (!blocks().erase(reinterpret_cast<std::uintptr_t>(at))) return failed(cudaErrorInvalidValue);
    free(at);
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void* at, std::size_t bytes, unsigned) {
    static const char* const limit = getenv("EMULATED_GPU_PINNED_MIB");
    std::lock_guard<std::mutex> guard(block_lock);
    std::size_t registered = bytes;
    for (auto& [address, block] : blocks()) if (block.kind == REGISTERED) registered += block.bytes;
    if (limit && registered > std::size_t(atol(limit)) << 20) return failed(cudaErrorMemoryAllocation);
    blocks()[reinterpret_cast<std::uintptr_t>(at)] = Block{bytes, 0, REGISTERED};
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* at) {
    std::lock_guard<std::mutex> guard(block_lock);
    return blocks().erase(reinterpret_cast<std::uintptr_t>(at)) ? cudaSuccess : failed(cudaErrorInvalidValue);
}
cudaError_t cudaMemPrefetchAsync(const void*, std::size_t, cudaMemLocation, unsigned, cudaStream_t) { return cudaSuccess; }

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* at) {
    memset(attributes, 0, sizeof *attributes);
    Block block;
    if (!find(at, &block)) {
        attributes->type = cudaMemoryTypeUnregistered;
        attributes->device = -2;
        return cudaSuccess;
    }
    attributes->type = block.kind == DEVICE ? cudaMemoryTypeDevice : block.kind == MANAGED ? cudaMemoryTypeManaged : cudaMemoryTypeHost;
    attributes->devicePointer = const_cast<void*>(at);
    attributes->hostPointer = block.kind == DEVICE ? nullptr : const_cast<void*>(at);
    return cudaSuccess;
}

static cudaError_t copy(void* to, const void* from, std::size_t bytes, cudaStream_t stream, bool waits) {
    gpu::make_context();
    bool to_device = on_device(to), from_device = on_device(from);
    Capture* into = nullptr;
    if (waits) { if (cudaError_t error = unsafe("a copy that waits")) return error; }
    else if (cudaError_t error = enqueue(stream, nullptr, &into)) return error;
    if (into) {
        if ((!to_device && pageable(to)) || (!from_device && pageable(from))) count(gpu::PAGEABLE_CAPTURED);
        return cudaSuccess;
    }
    if (to_device) count(from_device ? gpu::COPY_ON_DEVICE : gpu::COPY_TO_DEVICE);
    else if (from_device) { count(gpu::COPY_TO_HOST); gpu::fill_readback(to, bytes); }
    else memcpy(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) { return copy(to, from, bytes, nullptr, true); }
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    return copy(to, from, bytes, stream, false);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t bytes, cudaStream_t stream) {
    return copy(to, from, bytes, stream, false);
}
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width,
                              std::size_t height, cudaMemcpyKind, cudaStream_t stream) {
    for (std::size_t row = 0; row < height; row++)
        if (cudaError_t error = copy(static_cast<char*>(to) + row * to_pitch,
                                     static_cast<const char*>(from) + row * from_pitch, width, stream, false)) return error;
    return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void*, const void*, std::size_t, std::size_t, cudaMemcpyKind) { return cudaSuccess; }
cudaError_t cudaGetSymbolAddress(void** at, const void*) {
    static void* const symbols = gpu::allocate_address(PAGE);
    *at = symbols;
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* at, int value, std::size_t bytes, cudaStream_t stream) {
    Capture* into = nullptr;
    if (cudaError_t error = enqueue(stream, nullptr, &into)) return error;
    if (!into) count(gpu::FILL);
    if (!on_device(at) && !into) memset(at, value, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemset(void* at, int value, std::size_t bytes) { return cudaMemsetAsync(at, value, bytes, nullptr); }

// ---- Streams ----

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
    gpu::make_context();
    std::lock_guard<std::recursive_mutex> guard(lock);
    Stream* made = new Stream{flags, priority, nullptr};
    streams().insert(made);
    *stream = reinterpret_cast<cudaStream_t>(made);
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (!streams().erase(of(stream))) return failed(cudaErrorInvalidResourceHandle);
    delete of(stream);
    return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) { *priority = of(stream)->priority; return cudaSuccess; }
static cudaError_t stream_wait(cudaStream_t stream, const char* what) {
    if (!capturing.load()) return cudaSuccess;
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (of(stream)->capture) return violation(of(stream)->capture, what);
    if (of(stream) == &legacy_stream)
        for (Capture* one : captures())
            if (!(one->origin->flags & cudaStreamNonBlocking)) return violation(one, what, cudaErrorStreamCaptureImplicit);
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { count(gpu::SYNCHRONIZE); return stream_wait(stream, "cudaStreamSynchronize"); }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return stream_wait(stream, "cudaStreamQuery"); }
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data, unsigned) { call(stream, cudaSuccess, data); return cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* data) {
    Capture* into = nullptr;
    if (cudaError_t error = enqueue(stream, nullptr, &into)) return error;
    if (!into) call(data);
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    if (!capturing.load()) return cudaSuccess;
    std::lock_guard<std::recursive_mutex> guard(lock);
    Event* on = reinterpret_cast<Event*>(event);
    Stream* waiting = of(stream);
    if (on->capture && captures().count(on->capture) && on->capture->id == on->capture_id) {
        if (waiting == &legacy_stream) return violation(on->capture, "waiting on the legacy stream", cudaErrorStreamCaptureImplicit);
        if (!waiting->capture) waiting->capture = on->capture;  // joins the same capture
    } else if (waiting->capture && on->recorded && !on->capture) {
        // A capturing stream must not wait for work outside its capture.
        return violation(waiting->capture, "waiting for an event outside of the capture", cudaErrorStreamCaptureIsolation);
    }
    return cudaSuccess;
}

// ---- Captures and graphs ----

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) { std::swap(*mode, thread_mode); return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    Stream* on = of(stream);
    if (on == &legacy_stream) return failed(cudaErrorStreamCaptureUnsupported);
    if (on->capture) return failed(cudaErrorIllegalState);
    on->capture = new Capture{next_capture++, new Graph(), on, mode, std::this_thread::get_id()};
    captures().insert(on->capture);
    capturing++;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    *graph = nullptr;
    Capture* ending = of(stream)->capture;
    if (!ending) return failed(cudaErrorIllegalState);
    if (ending->mode != cudaStreamCaptureModeRelaxed && ending->owner != std::this_thread::get_id()) return failed(cudaErrorStreamCaptureWrongThread);
    for (Stream* one : streams()) if (one->capture == ending) one->capture = nullptr;
    captures().erase(ending);
    capturing--;
    if (ending->invalid) return failed(cudaErrorStreamCaptureInvalidated);
    *graph = reinterpret_cast<cudaGraph_t>(ending->graph);
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    if (!capturing.load(std::memory_order_relaxed)) { *status = cudaStreamCaptureStatusNone; return cudaSuccess; }
    std::lock_guard<std::recursive_mutex> guard(lock);
    Capture* capture = of(stream)->capture;
    *status = !capture ? cudaStreamCaptureStatusNone : capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies, const cudaGraphEdgeData** edges, std::size_t* number) {
    cudaStreamIsCapturing(stream, status);
    if (*status == cudaStreamCaptureStatusNone) return cudaSuccess;
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (id) *id = of(stream)->capture->id;
    if (graph) *graph = reinterpret_cast<cudaGraph_t>(of(stream)->capture->graph);
    if (dependencies) *dependencies = nullptr;
    if (edges) *edges = nullptr;
    if (number) *number = 0;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
    *made = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    Graph* played = reinterpret_cast<Graph*>(graph);
    if (cudaError_t error = enqueue(stream, nullptr)) return error;
    count(gpu::GRAPH_LAUNCH);
    count(gpu::IN_GRAPHS, played->launches);
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { delete reinterpret_cast<Graph*>(graph); return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { delete reinterpret_cast<Graph*>(graph); return cudaSuccess; }
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, std::size_t* number) {
    *number = reinterpret_cast<Graph*>(graph)->nodes;
    return cudaSuccess;
}
cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return cudaSuccess; }

// ---- Events measure host time ----

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    gpu::make_context();
    Event* made = new Event();
    made->timed = !(flags & cudaEventDisableTiming);
    *event = reinterpret_cast<cudaEvent_t>(made);
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { delete reinterpret_cast<Event*>(event); return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    Event* on = reinterpret_cast<Event*>(event);
    count(gpu::EVENT);
    on->at = std::chrono::steady_clock::now();
    on->recorded = true;
    on->capture = nullptr;
    if (capturing.load()) {
        std::lock_guard<std::recursive_mutex> guard(lock);
        if (Capture* capture = of(stream)->capture) { on->capture = capture; on->capture_id = capture->id; }
    }
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
static cudaError_t query_event(cudaEvent_t event, const char* what) {
    if (reinterpret_cast<Event*>(event)->capture) return failed(cudaErrorCapturedEvent);
    return unsafe(what);
}
cudaError_t cudaEventQuery(cudaEvent_t event) { return query_event(event, "cudaEventQuery"); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { count(gpu::SYNCHRONIZE); return query_event(event, "cudaEventSynchronize"); }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
    Event *begin = reinterpret_cast<Event*>(from), *end = reinterpret_cast<Event*>(to);
    if (!begin->timed || !end->timed || !begin->recorded || !end->recorded) return failed(cudaErrorInvalidResourceHandle);
    if (begin->capture || end->capture) return failed(cudaErrorCapturedEvent);
    *milliseconds = std::chrono::duration<float, std::milli>(end->at - begin->at).count();
    return cudaSuccess;
}

}  // extern "C"

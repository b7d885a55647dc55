// The emulated GPU itself: its model, who holds how much of its memory, and the counters.
#include "gpu.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace gpu {

// CUDA makes slightly less memory available than the board has; the usable sizes are approximate.
static const Model MODELS[] = {
    {"3060", "NVIDIA GeForce RTX 3060", 8, 6, 28, 100, 2304, 192, 12288, 12044},
    {"4090", "NVIDIA GeForce RTX 4090", 8, 9, 128, 100, 73728, 384, 24564, 24208},
    {"3070", "NVIDIA GeForce RTX 3070", 8, 6, 46, 100, 4096, 256, 8192, 7966},
    {"3050", "NVIDIA GeForce RTX 3050", 8, 6, 18, 100, 1536, 96, 6144, 5937},
    {"2060", "NVIDIA GeForce RTX 2060", 7, 5, 30, 64, 3072, 192, 6144, 5929},
    {"5090", "NVIDIA GeForce RTX 5090", 12, 0, 170, 100, 98304, 512, 32607, 32110},
};

static long environment_number(const char* name, long fallback) {
    const char* text = getenv(name);
    return text && *text ? atol(text) : fallback;
}

const Model& model() {
    static const Model* chosen = [] {
        const char* key = getenv("EMULATED_GPU");
        for (const Model& one : MODELS)
            if (key && !strcmp(key, one.key)) return &one;
        return &MODELS[0];
    }();
    return *chosen;
}

std::size_t usable_bytes() {
    static const std::size_t bytes = std::size_t(environment_number("EMULATED_GPU_MIB", model().usable_mib)) << 20;
    return bytes;
}

std::size_t board_bytes() {
    // With EMULATED_GPU_MIB the driver still keeps what it keeps of the model's own memory.
    return usable_bytes() + (std::size_t(model().board_mib - model().usable_mib) << 20);
}

const unsigned char* uuid() {
    static const unsigned char bytes[16] = {0xfa, 0x4e, 0xca, 0x4d, 0, 0, 0x40, 0, 0x80, 0, 0, 0, 0, 0, 0, 1};
    return bytes;
}

// ---- Memory, counted for all processes in a small shared file ----


struct Row { std::int32_t pid; std::int32_t context; std::uint64_t bytes; };
struct Table { Row rows[256]; };

static std::mutex memory_lock;
static int table_file = -1;
static Table* table = nullptr;
static pid_t opened_by = 0;

// Maps the table, again after a fork. The caller holds memory_lock.
static Table* open_table() {
    if (table && opened_by == getpid()) return table;
    const char* chosen = getenv("EMULATED_GPU_STATE");
    std::string path = chosen ? chosen : "/dev/shm/emulated_gpu-" + std::to_string(getuid()) + "-" + model().key;
    table_file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (table_file < 0 || ftruncate(table_file, sizeof(Table)) != 0) { perror("emulated GPU: could not open its state file"); abort(); }
    void* mapping = mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED, table_file, 0);
    if (mapping == MAP_FAILED) { perror("emulated GPU: could not open its state file"); abort(); }
    table = static_cast<Table*>(mapping);
    opened_by = getpid();
    return table;
}

struct Locked {  // against the threads of this process and against other processes
    std::lock_guard<std::mutex> here{memory_lock};
    Table* rows = open_table();
    Locked() { flock(table_file, LOCK_EX); }
    ~Locked() { flock(table_file, LOCK_UN); }
    std::uint64_t used() {
        std::uint64_t sum = 0;
        for (Row& row : rows->rows) {
            if (row.pid && row.pid != getpid() && kill(row.pid, 0) != 0) row = Row{};  // the process is gone
            if (row.pid) sum += row.bytes;
        }
        return sum;
    }
    Row& mine() { return row_of(getpid()); }
    Row& row_of(pid_t pid) {
        Row* empty = nullptr;
        for (Row& row : rows->rows) {
            if (row.pid == pid) return row;
            if (!row.pid && !empty) empty = &row;
        }
        if (!empty) { fprintf(stderr, "emulated GPU: too many processes\n"); abort(); }
        *empty = Row{pid, 0, 0};
        return *empty;
    }
};

static bool add(Locked& locked, std::size_t bytes) {
    if (locked.used() + bytes > usable_bytes()) return false;
    locked.mine().bytes += bytes;
    return true;
}

static std::atomic<pid_t> context_of{0};

void make_context() {
    if (context_of.load(std::memory_order_relaxed) == getpid()) return;
    Locked locked;
    if (context_of == getpid()) return;
    // A process that was killed may have had our pid: start from zero.
    locked.mine() = Row{getpid(), 1, 0};
    add(locked, std::size_t(environment_number("EMULATED_GPU_CONTEXT_MIB", 300)) << 20);
    context_of = getpid();
}

static bool contains(const char* path, const char* text) {
    std::ifstream file(path);
    std::string content((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    return content.find(text) != std::string::npos;
}

// Lets the process EMULATED_GPU_FILL_PID take all memory but EMULATED_GPU_FILL_LEAVE_MIB at the first allocation after
// the file EMULATED_GPU_FILL_FILE contains EMULATED_GPU_FILL_TEXT. Another process that polled the file would come at a
// different moment in each run.
static void fill_if_due(Locked& locked) {
    static const char* const path = getenv("EMULATED_GPU_FILL_FILE");
    static const char* const text = getenv("EMULATED_GPU_FILL_TEXT");
    static bool done = !path || !text;
    if (done || !contains(path, text)) return;
    done = true;
    Row& row = locked.row_of(pid_t(environment_number("EMULATED_GPU_FILL_PID", 1)));
    if (row.bytes) return;  // another process of the run was first
    std::size_t kept = locked.used() + (std::size_t(environment_number("EMULATED_GPU_FILL_LEAVE_MIB", 0)) << 20);
    row.context = 1;
    if (kept < usable_bytes()) row.bytes = usable_bytes() - kept;
}

bool reserve(std::size_t bytes) {
    make_context();
    Locked locked;
    fill_if_due(locked);
    return add(locked, bytes);
}

void unreserve(std::size_t bytes) {
    Locked locked;
    locked.mine().bytes -= bytes;
}

std::size_t free_bytes() {
    Locked locked;
    return usable_bytes() - std::min<std::size_t>(locked.used(), usable_bytes());
}

int usages(Usage* found, int capacity) {
    Locked locked;
    locked.used();
    int count = 0;
    for (const Row& row : locked.rows->rows) {
        if (!row.pid || !row.context) continue;
        if (count < capacity) found[count] = Usage{row.pid, row.bytes};
        count++;
    }
    return count;
}

static const std::size_t PAGE = std::size_t(2) << 20;  // the driver aligns and counts large allocations in these

// First fit from the lowest address, as the driver appears to do: PyTorch's allocator orders its blocks by address.
static const std::size_t ALL_ADDRESSES = std::size_t(8) << 40;
static std::mutex address_lock;
static std::map<std::uintptr_t, std::size_t> holes;

static std::size_t round_to_pages(std::size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

void* allocate_address(std::size_t bytes) {
    std::lock_guard<std::mutex> guard(address_lock);
    static void* const all = mmap(nullptr, ALL_ADDRESSES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) return nullptr;
    static bool initialized = false;
    if (!initialized) {
        std::uintptr_t first = round_to_pages(reinterpret_cast<std::uintptr_t>(all));
        holes[first] = ALL_ADDRESSES - PAGE;
        initialized = true;
    }
    bytes = round_to_pages(bytes);
    for (auto hole = holes.begin(); hole != holes.end(); ++hole) {
        if (hole->second < bytes) continue;
        std::uintptr_t start = hole->first;
        std::size_t rest = hole->second - bytes;
        holes.erase(hole);
        if (rest) holes[start + bytes] = rest;
        return reinterpret_cast<void*>(start);
    }
    return nullptr;
}

void free_address(void* address, std::size_t bytes) {
    std::lock_guard<std::mutex> guard(address_lock);
    auto hole = holes.emplace(reinterpret_cast<std::uintptr_t>(address), round_to_pages(bytes)).first;
    auto next = std::next(hole);
    if (next != holes.end() && hole->first + hole->second == next->first) { hole->second += next->second; holes.erase(next); }
    if (hole != holes.begin()) {
        auto before = std::prev(hole);
        if (before->first + before->second == hole->first) { before->second += hole->second; holes.erase(hole); }
    }
}

// ---- Kernels and counts ----

std::atomic<std::uint64_t> counts[COUNTS];
static const char* const NAMES[COUNTS] = {
    "launch", "library", "convolution", "copy_to_device", "copy_to_host", "copy_on_device", "fill", "graph_launch",
    "in_graphs", "malloc", "free", "pinned", "synchronize", "event", "out_of_memory", "capture_violation",
    "pageable_captured"};

static std::mutex kernel_lock;
static std::unordered_map<const void*, Kernel*>& by_host() {
    static auto* map = new std::unordered_map<const void*, Kernel*>();
    return *map;
}
static std::map<std::string, Kernel*>& by_name() {
    static auto* map = new std::map<std::string, Kernel*>();
    return *map;
}

Kernel* kernel_of(const void* host_function) {
    std::lock_guard<std::mutex> lock(kernel_lock);
    Kernel*& found = by_host()[host_function];
    if (!found) found = new Kernel("unregistered");
    return found;
}

Kernel* kernel_named(const char* name) {
    std::lock_guard<std::mutex> lock(kernel_lock);
    Kernel*& found = by_name()[name];
    if (!found) found = new Kernel(strdup(name));
    return found;
}

}  // namespace gpu

// ---- What tests read through ctypes ----

extern const char* const emulated_gpu_stub_names[];
extern const int emulated_gpu_stubs;
extern std::atomic<std::uint64_t> emulated_gpu_stub_calls[];

extern "C" {

// Registers a kernel with the runtime. `name` points into the program's image and stays valid.
void emulated_gpu_register(const void* host_function, const char* name) {
    std::lock_guard<std::mutex> lock(gpu::kernel_lock);
    gpu::by_host()[host_function] = new gpu::Kernel(name);
}

std::uint64_t emulated_gpu_count(const char* name) {
    for (int which = 0; which < gpu::COUNTS; which++)
        if (!strcmp(name, gpu::NAMES[which])) return gpu::counts[which];
    return 0;
}

void emulated_gpu_reset() {
    for (auto& one : gpu::counts) one = 0;
    for (int stub = 0; stub < emulated_gpu_stubs; stub++) emulated_gpu_stub_calls[stub] = 0;
    std::lock_guard<std::mutex> lock(gpu::kernel_lock);
    for (auto& pair : gpu::by_host()) pair.second->launches = 0;
    for (auto& pair : gpu::by_name()) pair.second->launches = 0;
}

// Appends counters, called stubs and launched kernels to a file, or writes them to stderr if `path` is "-".
void emulated_gpu_report(const char* path) {
    FILE* out = strcmp(path, "-") ? fopen(path, "a") : stderr;
    if (!out) return;
    fprintf(out, "# process %d\n", getpid());
    for (int which = 0; which < gpu::COUNTS; which++)
        fprintf(out, "count %s %llu\n", gpu::NAMES[which], (unsigned long long)gpu::counts[which]);
    for (int stub = 0; stub < emulated_gpu_stubs; stub++)
        if (auto calls = emulated_gpu_stub_calls[stub].load())
            fprintf(out, "stub %s %llu\n", emulated_gpu_stub_names[stub], (unsigned long long)calls);
    std::lock_guard<std::mutex> lock(gpu::kernel_lock);
    std::map<std::string, std::uint64_t> sums;
    for (auto& pair : gpu::by_host())
        if (auto launches = pair.second->launches.load()) sums[pair.second->name] += launches;
    for (auto& pair : gpu::by_name())
        if (auto launches = pair.second->launches.load()) sums[pair.first] += launches;
    for (auto& pair : sums) fprintf(out, "kernel %llu %s\n", (unsigned long long)pair.second, pair.first.c_str());
    if (out != stderr) fclose(out);
}

__attribute__((destructor)) static void at_end() {
    if (const char* path = getenv("EMULATED_GPU_REPORT")) emulated_gpu_report(path);
}

}  // extern "C"

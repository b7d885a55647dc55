// cuBLAS, cuBLASLt, cuDNN and NVRTC: handles, descriptors and an algorithm for every query, but no arithmetic.
// The few types and constants are declared as in NVIDIA's documentation. Everything else is a generated stub.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "gpu.h"

extern "C" {

// ---- cuBLAS ----

static int any;  // what opaque descriptors point to
// Handles are distinct: PyTorch keeps a workspace per handle and a handle per thread.
int cublasCreate_v2(void** handle) { gpu::make_context(); *handle = new int; return 0; }
int cublasDestroy_v2(void* handle) { delete static_cast<int*>(handle); return 0; }
int cublasGetMathMode(void*, int* mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void*, int* mode) { *mode = 0; return 0; }
std::size_t cublasLtGetVersion() { return 130101; }
int cublasLtMatmulDescCreate(void** made, int, int) { *made = &any; return 0; }
int cublasLtMatrixLayoutCreate(void** made, int, std::uint64_t, std::uint64_t, std::int64_t) { *made = &any; return 0; }
int cublasLtMatmulPreferenceCreate(void** made) { *made = &any; return 0; }

struct Heuristic { std::uint64_t algorithm[8]; std::size_t workspace; int state; float waves; int reserved[4]; };
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, Heuristic* results, int* found) {
    memset(results, 0, sizeof *results);
    results->waves = 1.0f;
    *found = 1;
    return 0;
}
int cublasLtMatmul() { gpu::library_call(gpu::LIBRARY); return 0; }

// ---- cuDNN: backend descriptors store the attributes that are set and return them ----

enum Descriptor { ENGINE = 2, ENGINE_CONFIGURATION = 3, HEURISTICS = 4, PLAN = 5, TENSOR = 17 };
enum Attribute {
    HEURISTIC_GRAPH = 201, HEURISTIC_RESULTS = 202, CONFIGURATION_ENGINE = 300, PLAN_CONFIGURATION = 401, PLAN_WORKSPACE = 402, GRAPH_OPERATIONS = 801,
    TENSOR_TYPE = 901, TENSOR_DIMENSIONS = 902, ENGINE_GRAPH = 1300, ENGINE_INDEX = 1301
};
enum { TYPE_DESCRIPTOR = 15 };

static std::size_t bytes_of(int type) {
    switch (type) {
        case 0: case 3: case 5: case 6: case 15: case 26: return 8;  // handle, int64, double, pointer, descriptor, fraction
        case 2: case 24: return 1;                                   // boolean, character
        default: return 4;                                           // enumerations, float, int32
    }
}

struct Backend {
    int kind;
    struct Value { int type; std::int64_t count; std::vector<char> bytes; };
    std::map<int, Value> values;
    void set(int name, int type, std::int64_t count, const void* from) {
        Value& value = values[name];
        value.type = type;
        value.count = count;
        value.bytes.assign(static_cast<const char*>(from), static_cast<const char*>(from) + count * bytes_of(type));
    }
    Backend* child(int name, int place = 0) const {
        auto found = values.find(name);
        if (found == values.end() || place >= found->second.count) return nullptr;
        return reinterpret_cast<Backend* const*>(found->second.bytes.data())[place];
    }
};

int cudnnBackendCreateDescriptor(int kind, Backend** made) { *made = new Backend{kind, {}}; return 0; }
int cudnnBackendDestroyDescriptor(Backend* descriptor) { delete descriptor; return 0; }
int cudnnBackendFinalize(Backend*) { return 0; }
int cudnnBackendSetAttribute(Backend* descriptor, int name, int type, std::int64_t count, const void* from) {
    if (type == TYPE_DESCRIPTOR) {
        // The descriptor that is referred to may be destroyed first, so keep a copy. Copies leak; they are few and small.
        std::vector<Backend*> copies;
        for (std::int64_t place = 0; place < count; place++) copies.push_back(new Backend(*static_cast<Backend* const*>(from)[place]));
        descriptor->set(name, type, count, copies.data());
    } else {
        descriptor->set(name, type, count, from);
    }
    return 0;
}

// The workspace of a convolution: a share of its tensors' bytes, which cuDNN needs to transpose them, plus a constant.
static std::int64_t workspace_of(const Backend* plan) {
    static const double share = getenv("EMULATED_GPU_CUDNN_SHARE") ? atof(getenv("EMULATED_GPU_CUDNN_SHARE")) : 0.0;
    static const std::int64_t fixed = getenv("EMULATED_GPU_CUDNN_BYTES") ? atoll(getenv("EMULATED_GPU_CUDNN_BYTES")) : 0;
    const Backend* configuration = plan->child(PLAN_CONFIGURATION);
    const Backend* engine = configuration ? configuration->child(CONFIGURATION_ENGINE) : nullptr;
    const Backend* graph = engine ? engine->child(ENGINE_GRAPH) : nullptr;
    if (engine && *reinterpret_cast<const std::int64_t*>(engine->values.at(ENGINE_INDEX).bytes.data()) > 0) return 0;
    const Backend* operation = graph ? graph->child(GRAPH_OPERATIONS) : nullptr;
    if (!operation) return fixed;
    double sum = 0;
    for (auto& pair : operation->values) {
        if (pair.second.type != TYPE_DESCRIPTOR) continue;
        const Backend* tensor = operation->child(pair.first);
        auto dimensions = tensor->values.find(TENSOR_DIMENSIONS);
        if (tensor->kind != TENSOR || dimensions == tensor->values.end()) continue;
        auto type = tensor->values.find(TENSOR_TYPE);
        bool single = type != tensor->values.end() && *reinterpret_cast<const int*>(type->second.bytes.data()) == 0;
        double size = single ? 4 : 2;
        for (std::int64_t place = 0; place < dimensions->second.count; place++)
            size *= double(reinterpret_cast<const std::int64_t*>(dimensions->second.bytes.data())[place]);
        sum += size;
    }
    return fixed + std::int64_t(sum * share) / 512 * 512;
}

int cudnnBackendGetAttribute(Backend* descriptor, int name, int type, std::int64_t most, std::int64_t* count, void* into) {
    std::int64_t none;
    if (!count) count = &none;
    if (descriptor->kind == HEURISTICS && name == HEURISTIC_RESULTS) {
        // Two engines for every query. The second needs no workspace, like most of cuDNN's slow engines.
        static const std::int64_t engines = getenv("EMULATED_GPU_CUDNN_ENGINES") ? atoll(getenv("EMULATED_GPU_CUDNN_ENGINES")) : 2;
        *count = into && most < engines ? most : engines;
        for (std::int64_t index = 0; into && index < *count; index++) {
            Backend engine{ENGINE, {}}, *result = static_cast<Backend**>(into)[index];
            engine.set(ENGINE_INDEX, 3, 1, &index);
            if (Backend* graph = descriptor->child(HEURISTIC_GRAPH)) { Backend* kept = graph; engine.set(ENGINE_GRAPH, TYPE_DESCRIPTOR, 1, &kept); }
            Backend* kept = new Backend(engine);
            result->set(CONFIGURATION_ENGINE, TYPE_DESCRIPTOR, 1, &kept);
        }
        return 0;
    }
    if (descriptor->kind == PLAN && name == PLAN_WORKSPACE) {
        *count = 1;
        if (most >= 1 && into) *static_cast<std::int64_t*>(into) = workspace_of(descriptor);
        return 0;
    }
    auto found = descriptor->values.find(name);
    if (found == descriptor->values.end()) { *count = 0; return 0; }
    *count = found->second.count;
    if (!into) return 0;
    std::int64_t given = *count < most ? *count : most;
    if (type == TYPE_DESCRIPTOR) {
        for (std::int64_t place = 0; place < given; place++)
            *static_cast<Backend**>(into)[place] = *descriptor->child(name, int(place));
    } else {
        memcpy(into, found->second.bytes.data(), given * bytes_of(type));
    }
    return 0;
}
int cudnnBackendExecute(void*, Backend*, Backend*) { gpu::library_call(gpu::CONVOLUTION); return 0; }

int cudnnCreate(void** handle) { gpu::make_context(); *handle = new int; return 0; }
std::size_t cudnnGetVersion() { return 92000; }
std::size_t cudnnGetCudartVersion() { return 13000; }
int cudnnGetProperty(int which, int* value) { *value = which == 0 ? 9 : which == 1 ? 20 : 0; return 0; }
const char* cudnnGetErrorString(int) { return "emulated GPU: cuDNN error"; }
void cudnnGetLastErrorString(char* text, std::size_t most) { snprintf(text, most, "emulated GPU"); }
int cudnnGetStream(void*, void** stream) { *stream = nullptr; return 0; }
int cudnnCreateTensorDescriptor(void** made) { *made = &any; return 0; }
int cudnnCreateFilterDescriptor(void** made) { *made = &any; return 0; }
int cudnnCreateConvolutionDescriptor(void** made) { *made = &any; return 0; }
int cudnnCreateActivationDescriptor(void** made) { *made = &any; return 0; }

// ---- NVRTC: every program compiles to a single byte ----

int nvrtcVersion(int* major, int* minor) { *major = 13; *minor = 0; return 0; }
int nvrtcCreateProgram(void** program, const char*, const char*, int, const char* const*, const char* const*) { *program = &any; return 0; }
int nvrtcGetLoweredName(void*, const char* name, const char** lowered) { *lowered = name; return 0; }
int nvrtcGetPTXSize(void*, std::size_t* bytes) { *bytes = 1; return 0; }
int nvrtcGetCUBINSize(void*, std::size_t* bytes) { *bytes = 1; return 0; }
int nvrtcGetPTX(void*, char* text) { *text = 0; return 0; }
int nvrtcGetCUBIN(void*, char* text) { *text = 0; return 0; }
int nvrtcGetProgramLogSize(void*, std::size_t* bytes) { *bytes = 1; return 0; }
int nvrtcGetProgramLog(void*, char* text) { *text = 0; return 0; }
const char* nvrtcGetErrorString(int) { return "emulated GPU: NVRTC error"; }

}  // extern "C"

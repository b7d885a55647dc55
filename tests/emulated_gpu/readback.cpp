// What a copy from the device delivers. Kernels compute nothing, so the host gets a constant that depends on the dtype
// alone: 2^-6 for floating-point tensors, so that a loss and a gradient norm are finite and not zero; zero for all
// other types, so that counts, indices and flags lead nowhere (no nonzero elements, False).
//
// cudaMemcpy does not know dtypes. PyTorch reaches it through two functions that do: at::native::copy_ (.cpu(), .to(),
// .tolist(), copy_) and at::native::_local_scalar_dense_cuda (.item(), float()). This file defines both. PyTorch calls
// them through its symbol table, which finds these definitions first because torch loads CUDA's libraries, that is this
// one, with RTLD_GLOBAL before its own. Each notes the dtype and calls PyTorch's function.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "gpu.h"

// PyTorch's types, only as far as these two signatures need them: its headers would cost a minute of compilation.
namespace c10 {
class Scalar {
public:
    ~Scalar();  // not trivial, hence returned through a hidden pointer; the size does not matter
};
}  // namespace c10
namespace at {
class Tensor;
namespace native {
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking);
c10::Scalar _local_scalar_dense_cuda(const Tensor& self);
}  // namespace native
}  // namespace at

// Numbers of c10::ScalarType.
enum ScalarType { BYTE = 0, HALF = 5, FLOAT = 6, DOUBLE = 7, BFLOAT16 = 15 };
static thread_local std::int32_t current_type = BYTE;

template <typename Function>
static Function original(const char* library, const char* symbol) {
    void* handle = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
    void* found = handle ? dlsym(handle, symbol) : nullptr;
    if (!found) { fprintf(stderr, "emulated GPU: %s has no %s; this PyTorch is not supported\n", library, symbol); abort(); }
    return reinterpret_cast<Function>(found);
}

// Notes the dtype of a tensor for the copies that this thread makes during the object's lifetime.
class TypeOf {
    std::int32_t before = current_type;

public:
    explicit TypeOf(const at::Tensor& tensor) {
        using GetType = int (*)(const at::Tensor*, std::int32_t*);
        static const GetType get_type = original<GetType>("libtorch_cpu.so", "aoti_torch_get_dtype");
        get_type(&tensor, &current_type);
    }
    ~TypeOf() { current_type = before; }
};

// The destination's dtype counts: PyTorch converts on the device before it copies to the host.
at::Tensor& at::native::copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
    using Copy = at::Tensor& (*)(at::Tensor&, const at::Tensor&, bool);
    static const Copy copy = original<Copy>("libtorch_cpu.so", "_ZN2at6native5copy_ERNS_6TensorERKS1_b");
    TypeOf noted(self);
    return copy(self, source, non_blocking);
}

c10::Scalar at::native::_local_scalar_dense_cuda(const at::Tensor& self) {
    using Read = c10::Scalar (*)(const at::Tensor&);
    static const Read read = original<Read>("libtorch_cuda.so", "_ZN2at6native24_local_scalar_dense_cudaERKNS_6TensorE");
    TypeOf noted(self);
    return read(self);
}

template <typename Bits>
static void fill(void* host, std::size_t bytes, Bits bits) {
    Bits* values = static_cast<Bits*>(host);
    for (std::size_t index = 0; index < bytes / sizeof(Bits); index++) values[index] = bits;
}

void gpu::fill_readback(void* host, std::size_t bytes) {
    // The bits of 2^-6 in each format.
    switch (current_type) {
        case HALF: return fill<std::uint16_t>(host, bytes, 0x2400);
        case BFLOAT16: return fill<std::uint16_t>(host, bytes, 0x3C80);
        case FLOAT: return fill<std::uint32_t>(host, bytes, 0x3C800000);
        case DOUBLE: return fill<std::uint64_t>(host, bytes, 0x3F90000000000000);
        default: memset(host, 0, bytes);
    }
}

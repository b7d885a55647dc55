"""Compile the emulated GPU: one shared library that replaces all of NVIDIA's.

Symbols that PyTorch and bitsandbytes need from NVIDIA's libraries and that the C++ sources here do not define become
stubs that return 0 and are counted. Symbols get the versions that those libraries require. Standard library only.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = tuple(sorted(HERE.glob("*.cpp")))
HEADERS = tuple(sorted(HERE.glob("*.h")))
LIBRARY = "libemulated_gpu.so"
# NVIDIA's symbols by prefix, the longest first.
_NVIDIA = re.compile(
    r"(__cuda|cuda|cublas|cudnn|cufft|curand|cusparse|cusolver|nccl|nvrtc|nvshmem|cupti|cuFile|nvml|nvtx|cu(?=[A-Z]))"
)
# Further exports: this library's counters, and the functions of PyTorch that readback.cpp replaces.
_OURS = re.compile(r"emulated_gpu_|_ZN2at6native")
# Driver and NVML functions that PyTorch and Triton look up by name, which no library lists as undefined.
_LOOKED_UP = [
    "cuCtxFromGreenCtx",
    "cuDevResourceGenerateDesc",
    "cuDevSmResourceSplitByCount",
    "cuDeviceGetDevResource",
    "cuGreenCtxCreate",
    "cuGreenCtxDestroy",
    "cuGreenCtxStreamCreate",
    "cuMemExportToShareableHandle",
    "cuMemGetAllocationPropertiesFromHandle",
    "cuMemImportFromShareableHandle",
    "cuMemRetainAllocationHandle",
    "cuMemsetD32Async",
    "cuMulticastAddDevice",
    "cuMulticastBindMem",
    "cuMulticastCreate",
    "cuMulticastUnbind",
    "cuStreamWriteValue32",
    "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetNvLinkRemoteDeviceType",
    "nvmlDeviceGetNvLinkRemotePciInfo_v2",
    "nvmlDeviceGetP2PStatus",
]
# Stubs of functions that launch a kernel on the device.
_KERNELS = re.compile(
    r"cublas(?!Lt|[GS]et).*(gemm|Gemm|gemv|dot|trsm|axpy|scal|ger)|cufftExec|cusolverDn.*(potrf|getrf|gesvd|syevd)$"
)
# Version node of symbols that are requested without a version.
_UNVERSIONED = "EMULATED_GPU"
# Libraries that are opened by name.
_OPENED = ("libcuda.so.1", "libnvidia-ml.so.1", "libnvrtc.so.13")


def compile_library(folder: Path, include: Path, libraries: Sequence[Path]) -> None:
    """Compile the library into an existing folder, with a link for each of NVIDIA's library names.

    `include` has CUDA's headers; `libraries` are the shared libraries of PyTorch and bitsandbytes that will run on it.
    Raises subprocess.CalledProcessError with the compiler's output.
    """
    flags = ["-std=c++17", "-O2", "-fPIC", "-Wall", "-Wno-deprecated-declarations", f"-I{include}", f"-I{HERE}"]
    objects = [_compile(source, folder, flags) for source in SOURCES]
    own = _defined(_output("nm", "--defined-only", "-g", *objects))
    versions, names = _required(libraries)
    versions |= {name: _UNVERSIONED for name in _LOOKED_UP if name not in own}
    stubs = folder / "stubs.cpp"
    stubs.write_text(_stub_source(sorted(set(versions) - own)), encoding="utf-8")
    objects.append(_compile(stubs, folder, flags))
    version_script = folder / "versions.map"
    version_script.write_text(_version_script(versions, own), encoding="utf-8")
    script = f"-Wl,--version-script={version_script}"
    _output("g++", "-shared", "-o", folder / LIBRARY, *objects, script, "-ldl", "-lpthread")
    for name in names | set(_OPENED):
        (folder / name).symlink_to(LIBRARY)


def _compile(source: Path, folder: Path, flags: Sequence[str]) -> Path:
    target = folder / f"{source.name}.o"
    _output("g++", *flags, "-c", source, "-o", target)
    return target


def _output(*command: object) -> str:
    words = [str(word) for word in command]
    return subprocess.run(words, check=True, capture_output=True, encoding="utf-8").stdout


def _defined(symbols: str) -> set[str]:
    """Return the names in `nm`'s list of defined symbols, without versions."""
    fields = (line.split() for line in symbols.splitlines())
    return {field[2].partition("@")[0] for field in fields if len(field) == 3}


def _required(libraries: Sequence[Path]) -> tuple[dict[str, str], set[str]]:
    """Return NVIDIA's symbols that the libraries need, with their versions, and the names of NVIDIA's libraries."""
    versions: dict[str, str] = {}
    names: set[str] = set()
    defined: set[str] = set()
    for library in libraries:
        for line in _output("nm", "-D", "--undefined-only", library).splitlines():
            name, _, version = line.split()[-1].partition("@")
            if _NVIDIA.match(name):
                versions.setdefault(name, version.lstrip("@") or _UNVERSIONED)
        defined |= _defined(_output("nm", "-D", "--defined-only", library))
        names |= set(re.findall(r"\[(lib(?:cu|nv|nccl)[^\]]+)\]", _output("readelf", "-d", library)))
    names.discard("libnvshmem_extension.so")  # PyTorch's own
    return {name: version for name, version in versions.items() if name not in defined}, names


def _stub_source(stubs: Sequence[str]) -> str:
    lines = ['#include "gpu.h"', f"extern const int emulated_gpu_stubs = {len(stubs)};"]
    lines.append(f"std::atomic<std::uint64_t> emulated_gpu_stub_calls[{len(stubs)}];")
    names = ", ".join(f'"{name}"' for name in stubs)
    lines.append(f'extern const char* const emulated_gpu_stub_names[] = {{{names}}};\nextern "C" {{')
    for index, name in enumerate(stubs):
        kernel = "gpu::library_call(gpu::LIBRARY); " if _KERNELS.match(name) else ""
        lines.append(f"int {name}() {{ emulated_gpu_stub_calls[{index}]++; {kernel}return 0; }}")
    return "\n".join([*lines, "}", ""])


def _version_script(versions: dict[str, str], own: set[str]) -> str:
    nodes: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted({*versions, *(name for name in own if _NVIDIA.match(name) or _OURS.match(name))}):
        nodes[versions.get(name, _UNVERSIONED)].append(name)
    rest = nodes.pop(_UNVERSIONED)
    text = [f"{node} {{ global: {'; '.join(names)}; }};" for node, names in nodes.items()]
    text.append(f"{_UNVERSIONED} {{ global: {'; '.join(rest)}; local: *; }};")
    return "\n".join(text) + "\n"

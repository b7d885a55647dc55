"""The real pynvml with its driver absent, broken, or one written here that fills structures as drivers do."""

# ruff: noqa: N802 - the functions bear the names of the driver

import ctypes
import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from trainer import gpu
from trainer.errors import ImpastoError

GIB = 1 << 30


class Driver:
    """The functions of libnvidia-ml that we use, for two cards; the second belongs to a Windows-like driver."""

    NAMES = (b"NVIDIA GeForce RTX 4090", b"NVIDIA GeForce GTX 1080")
    initialized = 0
    failure = pynvml.NVML_SUCCESS

    def nvmlInitWithFlags(self, flags):
        if self.failure == pynvml.NVML_SUCCESS:
            self.initialized += 1
        return self.failure

    def nvmlShutdown(self):
        self.initialized -= 1
        return pynvml.NVML_SUCCESS

    def nvmlSystemGetDriverVersion(self, text, length):
        text.value = b"581.15"
        return pynvml.NVML_SUCCESS

    def nvmlSystemGetCudaDriverVersion_v2(self, version):
        version._obj.value = 13010
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.NAMES)
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = index.value + 1
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetName(self, handle, text, length):
        text.value = self.NAMES[self._index(handle)]
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetUUID(self, handle, text, length):
        text.value = b"GPU-%d" % self._index(handle)
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory._obj.total, memory._obj.free = 24 * GIB, 20 * GIB
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        major._obj.value, minor._obj.value = ((8, 9), (6, 1))[self._index(handle)]
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetUtilizationRates(self, handle, rates):
        if self._index(handle) == 1:
            return pynvml.NVML_ERROR_NOT_SUPPORTED
        rates._obj.gpu, rates._obj.memory = 37, 5
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetTemperature(self, handle, sensor, temperature):
        temperature._obj.value = (61, 45)[self._index(handle)]
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle, generation):
        if self._index(handle) == 1:
            return pynvml.NVML_ERROR_NOT_SUPPORTED
        generation._obj.value = 4
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle, lanes):
        lanes._obj.value = 8
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle, count, processes):
        return self._processes(handle, count, processes, {11: 3 * GIB, 12: 1 * GIB})

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle, count, processes):
        if self._index(handle) == 1:
            return pynvml.NVML_ERROR_NOT_SUPPORTED
        return self._processes(handle, count, processes, {12: 1 * GIB, 13: 2 * GIB})

    def nvmlSystemGetProcessName(self, pid, text, length):
        names = {11: b"/usr/bin/python -m trainer", 12: b"C:\\Program Files\\Game\\game.exe"}
        text.value = names.get(pid.value, b"")
        return pynvml.NVML_SUCCESS if text.value else pynvml.NVML_ERROR_NO_PERMISSION

    def _index(self, handle):
        return ctypes.cast(handle, ctypes.c_void_p).value - 1

    def _processes(self, handle, count, processes, memory):
        if count._obj.value < len(memory):
            count._obj.value = len(memory)
            return pynvml.NVML_ERROR_INSUFFICIENT_SIZE
        count._obj.value = len(memory)
        for place, (pid, size) in enumerate(memory.items()):
            processes[place].pid = pid
            untold = self._index(handle) == 1
            processes[place].usedGpuMemory = pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value if untold else size
        return pynvml.NVML_SUCCESS


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(pynvml, "nvmlLib", driver)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return driver


def test_cards_are_read_with_who_uses_them(driver):
    first, second = gpu.list_gpus()
    assert first == gpu.Gpu(
        index=0,
        uuid="GPU-0",
        name="NVIDIA GeForce RTX 4090",
        total_bytes=24 * GIB,
        free_bytes=20 * GIB,
        driver="581.15",
        cuda=(13, 1),
        capability=(8, 9),
        uses=(
            gpu.GpuProcess(11, "python", 3 * GIB, "compute"),
            gpu.GpuProcess(13, "unknown", 2 * GIB, "graphics"),
            gpu.GpuProcess(12, "game.exe", 1 * GIB, "graphics"),
        ),
        load=37,
        temperature=61,
        bus=8 * 1.969e9,
    )
    assert (second.index, second.name, second.capability) == (1, "NVIDIA GeForce GTX 1080", (6, 1))
    assert second.uses == (gpu.GpuProcess(11, "python", None), gpu.GpuProcess(12, "game.exe", None))
    assert (second.load, second.temperature, second.bus) == (None, 45, None)
    assert (first.bf16, second.bf16) == (True, False)
    assert (first.generation, second.generation) == ("Ada", "Pascal")
    assert driver.initialized == 0


@pytest.mark.parametrize(
    ("told", "name"),
    [
        (b"C:\\\xc8\xe3\xf0\xfb\\\xe8\xe3\xf0\xe0.exe", "unknown"),  # Cyrillic as Windows' old alphabets have it
        ("/opt/spül".encode() + b"\xc3", "unknown"),  # cut off within a letter
        ("C:\\Jeux\\été.exe".encode(), "été.exe"),
        (b"/opt/a\x1b]0;b\x07c", "a]0;bc"),
        (b"\x1b", "unknown"),
    ],
)
def test_programs_bear_any_name(driver, told, name):
    def named(pid, text, length):
        text.value = told
        return pynvml.NVML_SUCCESS

    driver.nvmlSystemGetProcessName = named
    assert {use.name for card in gpu.list_gpus() for use in card.uses} == {name}


def test_a_card_that_does_not_answer_hides_no_other(driver):
    """As on shared machines, where a user may use one of them, or where one has fallen off the bus."""
    answers, lost = driver.nvmlDeviceGetMemoryInfo, {0}

    def answers_sometimes(handle, memory):
        return pynvml.NVML_ERROR_GPU_IS_LOST if driver._index(handle) in lost else answers(handle, memory)

    driver.nvmlDeviceGetMemoryInfo = answers_sometimes
    assert [card.index for card in gpu.list_gpus()] == [1]
    lost.add(1)
    with pytest.raises(ImpastoError, match="no longer responds"):
        gpu.list_gpus()


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((3, 7), "older"),
        ((5, 2), "Maxwell"),
        ((7, 0), "Volta"),
        ((7, 5), "Turing"),
        ((8, 6), "Ampere"),
        ((9, 0), "Hopper"),
        ((10, 0), "Blackwell"),
        ((12, 1), "Blackwell"),
    ],
)
def test_generations(capability, name):
    assert gpu.generation(capability) == name


def test_the_workspace_of_cublas_is_stated():
    """Sizes as recorded on real cards: 8,519,680 bytes on consumer cards and 33,554,432 on Hopper."""
    assert gpu.cublas_workspace((8, 6), deterministic=False) == ":4096:2:16:8"
    assert gpu.cublas_workspace((9, 0), deterministic=False) == ":4096:8"
    assert gpu.cublas_workspace((8, 6), deterministic=True) == ":4096:8"


def test_a_card_is_found_by_the_uuid_that_torch_gives(driver):
    uuid = "6f8ab3e1-3c40-5d9b-9a52-c9b1b7f00001"
    found = [dataclasses.replace(card, uuid=f"GPU-{number}{uuid[1:]}") for number, card in enumerate(gpu.list_gpus())]
    assert gpu.gpu_with_uuid(f"1{uuid[1:]}".upper(), found) == found[1]
    assert gpu.gpu_with_uuid(found[0].uuid, found) == found[0]
    assert gpu.gpu_with_uuid(uuid, found) is None


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "installed but not running"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "was updated"),
        (pynvml.NVML_ERROR_UNKNOWN, "Unknown Error"),
    ],
)
def test_a_driver_that_does_not_work_is_told_in_words(driver, failure, words):
    driver.failure = failure
    with pytest.raises(ImpastoError, match=words) as caught:
        gpu.list_gpus()
    assert caught.value.code == "gpu.driver"
    assert "driver" in caught.value.remedy


def in_child(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="names Linux' libraries")
def test_a_library_that_is_not_nvml_is_a_broken_driver(tmp_path, monkeypatch):
    loaded = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    some_library = next(line.split()[-1] for line in loaded if "libc.so" in line)
    shutil.copy(some_library, tmp_path / "libnvidia-ml.so.1")
    code = (
        "from trainer import gpu\nfrom trainer.errors import ImpastoError\n"
        "try: gpu.list_gpus()\n"
        "except ImpastoError as error: print(error)\n"
    )
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert "damaged or far too old" in in_child(code)


def test_without_a_driver_there_are_no_cards():
    """Holds on machines without one, as CI's are; on others the real cards answer."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        assert gpu.list_gpus() == []
    else:
        pynvml.nvmlShutdown()
        assert all(card.total_bytes >= card.free_bytes > 0 for card in gpu.list_gpus())

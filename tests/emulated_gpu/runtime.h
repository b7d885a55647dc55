// What the files of the CUDA runtime share.
#pragma once

#include <cuda_runtime_api.h>

#include "gpu.h"

// Notes an error as the thread's last one, until cudaGetLastError, and returns it.
cudaError_t failed(cudaError_t error);

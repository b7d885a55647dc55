"""Impasto's engine: trains SD 1.5 and SDXL LoRAs, headless."""

import logging

# On some CPUs bitsandbytes warns at import that an optional kernel is missing, which Impasto does not use. This package
# is imported before any library that imports bitsandbytes.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: "gemm_4bit_forward" not in str(record.msg))

# diffusers pipelines make transformers look for image processors and warn without torchvision; ours process no images.
logging.getLogger("transformers.utils.import_utils").addFilter(lambda record: "torchvision" not in str(record.msg))

__version__ = "0.1.0"

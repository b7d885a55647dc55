"""Impasto's engine: trains SD 1.5 and SDXL LoRAs, headless."""

import logging

# On some CPUs bitsandbytes warns at import that an optional kernel is missing, which nothing here uses. Whichever
# library imports it, this package was imported before.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: "gemm_4bit_forward" not in str(record.msg))

# diffusers' pipelines make transformers look for picture processors; ours take no pictures, so the one without
# torchvision does as well.
logging.getLogger("transformers.utils.import_utils").addFilter(lambda record: "torchvision" not in str(record.msg))

__version__ = "0.1.0"

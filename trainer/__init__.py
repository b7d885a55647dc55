"""Impasto's engine: trains SD 1.5 and SDXL LoRAs, headless."""

import logging

# On some CPUs bitsandbytes warns at import that an optional kernel is missing, which nothing here uses. Whichever
# library imports it, this package was imported before.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: "gemm_4bit_forward" not in str(record.msg))

__version__ = "0.1.0"

"""LoRA layers, named as in PEFT, that run fewer kernels per step and save only what backward needs.

`attach` installs these layers unless the caller asks for PEFT's. They have not been measured on a GPU yet.
"""

ENABLED = True
"""Whether training uses these layers by default."""

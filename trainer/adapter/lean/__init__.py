"""Lean LoRA layers under PEFT's names: fewer kernels per step, and only what backward needs is saved.

`attach` installs them unless its caller asks for PEFT's own layers. They have not been measured on a GPU yet.
"""

ENABLED = True
"""Whether training uses these layers by default."""

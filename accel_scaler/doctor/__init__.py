"""``accel-scaler doctor``: what a launch would do here, and what would go wrong in it.

The arguments of a launch come in; a description of what it would start, the hazards in it and what
attaching mends go out as text or JSON. It starts nothing, makes no Accelerator and writes no file.
"""

from .command import main

__all__ = ["main"]

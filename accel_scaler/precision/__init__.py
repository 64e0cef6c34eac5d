"""Modules that run in float32 within a model that runs in float16: ``fp32_modules``.

:class:`Fp32Module` changes one module's forward, and gives it back as it was;
:class:`ChosenModules` does so with those that globs name. What comes in are torch modules, what
goes out are the same, in place. :func:`warn_past_float16` names the weights that need it. The
folder knows torch alone: no scale, no window, no optimizer, and not Accelerate.
"""

from .chosen import ChosenModules
from .fp32_modules import Fp32Module
from .names import named, refuse_unmatched
from .past_float16 import warn_past_float16

__all__ = ["ChosenModules", "Fp32Module", "named", "refuse_unmatched", "warn_past_float16"]

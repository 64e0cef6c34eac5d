"""Accelerate and the Trainer: :func:`attach` and :func:`detach`.

``attach`` changes the class of an accelerator or a Trainer to one of ours, whose overridden methods
call the boundary and the asynchronous step; ``detach`` changes it back. No function of another
library is replaced. The folder computes no gradient itself, and knows no launcher.
"""

from .accelerator import ScaledAccelerator as ScaledAccelerator
from .attaching import attach as attach, attach_default as attach_default, detach as detach
from .stock_scaler import SCALE_SETTINGS as SCALE_SETTINGS, scaled_elsewhere as scaled_elsewhere

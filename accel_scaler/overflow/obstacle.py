"""Why a window cannot be made again: each reason, with the text that the log gives for it."""

from __future__ import annotations

from enum import Enum


class Obstacle(str, Enum):
    """A reason. It ends the sentence "the window is skipped, as its gradients cannot be made
    again: ...". An empty text in its place means that there is none."""

    __str__ = str.__str__

    # The forwards cannot run again.
    TOO_LARGE = "a forward was not recorded: its inputs and gradients take more than {} MiB"
    DIFFERENTIATED = (
        "a forward was not recorded: its gradient is differentiated itself (create_graph=True)"
    )
    TWICE = "a forward was not recorded: two backwards went through it (retain_graph=True)"
    NOT_SEEN = "no forward of a prepared model, with accelerator.backward(), was seen in it"
    MODEL_GONE = "a model that ran in it is gone"
    CHANGED_INPUT = "an input, or the gradient of an output, was changed in place since"
    RAISED = "it raised {}"

    # The forwards would be others by now.
    MOVED = "its parameters were changed between a forward and the step"
    UPDATED = "its parameters were updated since a forward of an earlier step"
    LARGE_BUFFER = "a buffer of more than 65536 elements was written to"
    WRITES = "its forward writes to its parameters"
    OTHER_OUTPUT = "its forward gave another output: it has state of its own"

    # The gradients would be others.
    OUTSIDE = "parameters were used outside of a forward, or in a gradient penalty"
    UNFINISHED = "a backward in it was not accelerator.backward()"
    INFINITE = "the gradient of an output was not finite"
    CHANGED = "its gradients were changed after the backward"
    UNSCALED = "they were unscaled by GradScaler.unscale_()"
    ADDED = "its gradients were added to those of an earlier step"
    FROM_ELSEWHERE = "a parameter got a gradient that no recorded forward gives"
    LOST_BITS = "float16 has lost bits at this scale: more than 1% of a finite gradient"
    DIFFERENT = "a finite gradient came out different: it was changed, or made by a hook"

    # Other optimizers, and other ranks.
    STEPPED = "another optimizer has updated parameters in it already"
    PARTNER_ADDED = "another optimizer has gradients of an earlier step"
    CLIPPED = "an earlier clip is left to the step of an optimizer, and would be lost"
    ALONE = (
        "the ranks are not known to have overflowed together: they step alone, may run out of "
        "inputs (Join), have other settings, or were attached after prepare"
    )

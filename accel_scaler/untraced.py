"""Calls that ``torch.compile`` does not look into."""

from __future__ import annotations

from torch._compile import _disable_dynamo

untraced = _disable_dynamo
"""A call that ends a window, hands an update over, or waits: where a compiled function (a whole
training step, say) contains it, the graph ends, the call runs as it is, and a graph begins.

Traced, it would be run in pieces, and between two of them dynamo looks at whatever parameters the
next piece uses. It would meet one that waits for a task that the following piece is to submit.

What torch's own optimizers use, which imports dynamo with the first call and not before.
"""

"""``pytest -p as_on_a_gpu``: stock Accelerate's fp16 on a CPU, for runs to compare with.

Stock leaves scaler and autocast off there (fault F6 in the README); a GPU would switch them on.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
from accelerate import Accelerator
from support import stock_fp16_on_cpu


@pytest.fixture(autouse=True, scope="session")
def as_on_a_gpu() -> Iterator[None]:
    """Each ``Accelerator`` with fp16 gets torch's own scaler, and autocast."""
    stock = Accelerator.__init__

    @functools.wraps(stock)
    def __init__(accelerator: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        stock(accelerator, *args, **kwargs)
        if accelerator.mixed_precision == "fp16":
            stock_fp16_on_cpu(accelerator)

    Accelerator.__init__ = __init__
    yield
    Accelerator.__init__ = stock

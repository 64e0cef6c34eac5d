"""The simulated asynchronous device, under the name ``NAME``; see README.md beside the sources."""

import os

import torch
import torch._meta_registrations

from . import device_module
from .device_module import NAME

torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, device_module)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

if spec := os.environ.get("SIM_COST"):  # up_gbps=25,down_gbps=25,memory_gbps=1000,tflops=80
    given = {name: float(value) for name, value in (part.split("=") for part in spec.split(","))}
    device_module.set_cost(arithmetic=bool(given.pop("arithmetic", 1.0)), **given)

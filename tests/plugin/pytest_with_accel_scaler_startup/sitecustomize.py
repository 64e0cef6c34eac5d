"""Python runs this as it starts, in every process that a test under ``--with-accel-scaler`` starts.

The plugin puts this folder in front of PYTHONPATH. It must run on any Python, so it stays with the
standard library, and leaves ``sys.path`` as it would be.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

HERE = os.path.dirname(os.path.abspath(__file__))
NAME = "accel_scaler_replacing"


def start() -> None:
    """Replace, as in the process that runs the tests; then run the next ``sitecustomize``."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != HERE]
    # By its path: the plugin need not be installed for the Python that a test starts.
    path = os.path.join(os.path.dirname(HERE), NAME + ".py")
    spec = importlib.util.spec_from_file_location(NAME, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} of --with-accel-scaler cannot be loaded")
    module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.start_from_environment()
    following = PathFinder.find_spec("sitecustomize")
    if following is not None and following.loader is not None:
        hidden = sys.modules["sitecustomize"] = importlib.util.module_from_spec(following)
        following.loader.exec_module(hidden)


if __name__ == "sitecustomize":
    start()

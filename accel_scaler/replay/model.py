"""The user's model, made to be that of a file."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ..errors import ConfigError, listed, shown
from ..overflow_finder import PostMortem

MOST_NAMED = 3

Weights = dict[str, Tensor]


def make_model(where: str) -> Module:
    """Call the user's function.

    Args:
        where: ``package.module:function`` or ``path/to/file.py:function``.

    Raises:
        ConfigError: it cannot be found or called, or returns no model.
    """
    module, colon, name = where.rpartition(":")
    if not (module and colon and name.isidentifier()):
        raise ConfigError(
            f"--model: got {shown(where)}, expected package.module:function or "
            "path/to/file.py:function."
        )
    function = getattr(_imported(module), name, None)
    if not callable(function):
        raise ConfigError(f"--model: {module} has no function {name}.")
    try:
        model = function()
    except Exception as error:  # the user's own
        raise ConfigError(f"--model: {where} raised {type(error).__name__}: {error}") from error
    if not isinstance(model, Module):
        raise ConfigError(
            f"--model: {where} returned a {type(model).__name__}, expected a torch.nn.Module."
        )
    return model


def _imported(module: str) -> Any:
    try:
        if not module.endswith(".py"):
            with _importable(Path.cwd()):
                return importlib.import_module(module)
        path = Path(module).resolve()
        if not path.is_file():
            raise ConfigError(f"--model: {module}: no such file.")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        with _importable(path.parent):
            sys.modules.setdefault(path.stem, loaded)
            spec.loader.exec_module(loaded)
        return loaded
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # the user's own
        raise ConfigError(
            f"--model: {module} cannot be imported ({type(error).__name__}: {error}). A script "
            "needs `if __name__ == '__main__':` around what it runs."
        ) from error


@contextlib.contextmanager
def _importable(folder: Path) -> Any:
    """As if Python had been started there."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


def read_weights(where: str) -> Weights:
    """A state dict from a file or a folder of safetensors or torch files.

    Raises:
        ConfigError: there is none, or it cannot be read as weights alone.
    """
    path = Path(where)
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
    if not files or not all(each.is_file() for each in files):
        raise ConfigError(f"--weights: {where}: no weights there (*.safetensors, *.bin, *.pt).")
    found: Weights = {}
    for each in files:
        try:
            if each.suffix == ".safetensors":
                from safetensors.torch import load_file

                content: Any = load_file(each)
            else:
                content = torch.load(each, map_location="cpu", weights_only=True)
        except Exception as error:  # of many kinds, and none of ours
            raise ConfigError(
                f"--weights: {each}: cannot be read as weights ({type(error).__name__})."
            ) from None
        if not isinstance(content, dict):
            raise ConfigError(f"--weights: {each}: holds a {type(content).__name__}, no weights.")
        found.update((str(k), v) for k, v in content.items() if isinstance(v, Tensor))
    return found


@torch.no_grad()
def adopt(model: Module, file: PostMortem, weights: Weights | None) -> None:
    """Give the model the file's weights, modes and ``requires_grad``, in place.

    Args:
        model: as the user's function has made it, on the CPU or elsewhere.
        file: names, shapes and dtypes of its parameters and buffers have to be those of ``model``.
        weights: outrank those of the file; None and none in the file: the model keeps its own.

    Raises:
        ConfigError: it is another model; says in what.
    """
    _refuse_another(model, file)
    own = {**dict(Module.named_parameters(model)), **dict(Module.named_buffers(model))}
    given = file.weights if weights is None else weights
    if given is not None:
        missing = [n for n in Module.state_dict(model) if n in own and n not in given]
        if missing:
            raise ConfigError(f"--weights: they lack {listed(missing[:MOST_NAMED], len(missing))}.")
        for name, tensor in own.items():
            saved = given.get(name)
            if saved is None:
                continue
            if saved.shape != tensor.shape:
                raise ConfigError(
                    f"--weights: {name} has shape {tuple(saved.shape)}, expected "
                    f"{tuple(tensor.shape)}."
                )
            # Not copied into the old memory: strides may change how a product is summed.
            tensor.data = saved.to(tensor.device, tensor.dtype)
    for name, p in Module.named_parameters(model):
        p.requires_grad_(file.shapes[name][2])
    for name, module in model.named_modules():
        module.training = file.is_training.get(name, module.training)


def _refuse_another(model: Module, file: PostMortem) -> None:
    own = {
        name: (str(t.dtype), tuple(t.shape))
        for name, t in (*Module.named_parameters(model), *Module.named_buffers(model))
    }
    wrong: list[str] = []
    for name, (dtype, shape, _) in file.shapes.items():
        if name not in own:
            near = difflib.get_close_matches(name, own, n=1)
            wrong.append(f"it has no {name}{f' (but {near[0]})' if near else ''}")
        elif own[name] != (dtype, shape):
            wrong.append(
                f"{name} is {_in_words(*own[name])}, in the file {_in_words(dtype, shape)}"
            )
    wrong += [f"{name} is not in the file" for name in own if name not in file.shapes]
    if wrong:
        raise ConfigError(
            f"--model: {type(model).__name__} is not the model of the file ({file.model}): "
            f"{'; '.join(wrong[:MOST_NAMED])}"
            f"{f'; and {len(wrong) - MOST_NAMED} more' if len(wrong) > MOST_NAMED else ''}."
        )


def _in_words(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype.removeprefix('torch.')} {list(shape)}"

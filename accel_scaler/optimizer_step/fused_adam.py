"""torch's fused Adam kernel called directly, with its argument lists kept between steps.

``Adam.step`` gathers six lists in Python and increments one step counter a parameter; with
thousands of small tensors that takes longer than the update. The kernel and its arguments are
the same here, so are the results, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_, methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.optim import optimizer as optimizer_module

from ..scaling import (
    SMALL,
    call_fused,
    is_uniform,
    laid_out_otherwise,
    match_layout,
    parameters_of,
    run_on_one_thread,
)

KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
"""A parameter's state, in the order of the kernel's arguments."""


def call_adam(
    kind: type[Optimizer],
    group: Mapping[str, Any],
    lists: Sequence[list[Tensor]],
    grad_scale: Tensor | None,
) -> None:
    """The kernel of ``kind`` with the hyperparameters of ``group``.

    Args:
        lists: parameters, gradients, and what is at each of ``KEYS``.
    """
    # Before torch 2.7 no group says it.
    decoupled = group.get("decoupled_weight_decay", issubclass(kind, AdamW))
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
    kernel(
        *lists,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
        grad_scale=grad_scale,
        found_inf=None,
    )


class AdamGroup:
    """The kernel's argument lists for one parameter group."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        self.known: list[Tensor] = list(group["params"])
        self.states = [optimizer.state[p] for p in self.known]
        # One buffer, so that one addition counts the step for all; each entry is a view.
        steps = [state["step"] for state in self.states]
        self.counts = torch.stack(steps)
        for state, count in zip(self.states, self.counts.unbind(), strict=True):
            state["step"] = count
        self.strides = list(map(Tensor.stride, self.known))
        self.device = self.known[0].get_device()
        self.amsgrad = bool(group["amsgrad"])
        self.kind = type(optimizer)
        keys = ["exp_avg", "exp_avg_sq", "step"] + ["max_exp_avg_sq"] * self.amsgrad
        self.lists = {key: [state[key] for state in self.states] for key in keys}
        sizes = list(map(Tensor.numel, self.known))
        small = [i for i, size in enumerate(sizes) if size <= SMALL]
        large = [i for i, size in enumerate(sizes) if size > SMALL]
        batches = ((small, self.device == -1), (large, False))
        self.batches = [(places, one) for places, one in batches if places]
        """Indices of small and of large parameters, and whether one thread updates them."""

    def step(self, group: dict[str, Any], grads: list[Tensor], grad_scale: Tensor | None) -> None:
        """Update every parameter; ``group`` has the hyperparameters. Does not synchronise."""
        self.counts.add_(1)
        lists = [self.known, grads, *(self.lists.get(key, []) for key in KEYS)]
        for places, one_thread in self.batches:
            if len(places) < len(self.known):
                chosen = [[tensors[i] for i in places] if tensors else [] for tensors in lists]
            else:
                chosen = lists
            with run_on_one_thread(one_thread):
                call_adam(self.kind, group, chosen, grad_scale)

    def takes(self, grads: list[Tensor]) -> bool:
        """Whether the gradients are laid out as the kernel expects, none missing."""
        return (
            is_uniform(grads)
            and grads[0].get_device() == self.device
            and list(map(Tensor.stride, grads)) == self.strides
        )

    def is_current(self, group: dict[str, Any]) -> bool:
        """Whether parameters and state are still the same objects."""
        return (
            bool(group["amsgrad"]) == self.amsgrad
            and len(group["params"]) == len(self.known)
            and all(map(is_, group["params"], self.known))
            and all(
                all(map(is_, map(methodcaller("get", key), self.states), tensors))
                for key, tensors in self.lists.items()
            )
        )


class FusedAdam:
    """A plan for one ``Adam`` or ``AdamW`` with ``fused=True``; made anew when out of date."""

    def __init__(self, optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> None:
        self.state = optimizer.state
        self.entries = list(optimizer.state.values())
        self.groups = [AdamGroup(optimizer, group) for group in groups]

    @staticmethod
    def applies(optimizer: Optimizer) -> bool:
        """Whether a direct call of the kernel means the same as ``optimizer.step()``."""
        own_step = optimizer.__dict__.get("step")
        # Accelerate leaves the bound method there; an LR scheduler leaves its wrapper.
        by_scheduler = getattr(own_step, "_wrapped_by_lr_sched", False)
        wrapped = getattr(own_step, "__wrapped__" if by_scheduler else "__func__", None)
        return (
            type(optimizer) in (Adam, AdamW)
            and (own_step is None or wrapped is type(optimizer).step)
            and not optimizer._optimizer_step_pre_hooks
            and not optimizer._optimizer_step_post_hooks
            and not optimizer_module._global_optimizer_pre_hooks
            and not optimizer_module._global_optimizer_post_hooks
            and not torch.autograd.profiler._is_profiler_enabled
            and all(map(is_plain, optimizer.param_groups))
        )

    def is_current(self, optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether the lists are still the optimizer's."""
        return (
            optimizer.state is self.state
            and len(optimizer.state) == len(self.entries)
            and all(map(is_, optimizer.state.values(), self.entries))
            and len(self.groups) == len(groups)
            and all(mine.is_current(own) for mine, own in zip(self.groups, groups, strict=True))
        )


def is_plain(group: Mapping[str, Any]) -> bool:
    """Whether the kernel called directly does all that ``step()`` does for this group."""
    lr = group["lr"]
    return (
        bool(group["fused"])
        and not group["differentiable"]
        and not group.get("capturable")
        and all(isinstance(beta, float) for beta in group.get("betas", ()))
        and not (isinstance(lr, Tensor) and lr.device.type != "cpu")
    )


def _ready(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Every parameter is a float32 one of one device, has state laid out as it is, and is there
    once: a second time its steps would be counted apart."""
    params: list[Tensor] = group["params"]
    return (
        is_uniform([p.detach() for p in params])
        and all(optimizer.state.get(p) for p in params)
        and not any(laid_out_otherwise(p, optimizer.state) for p in params)
        and len(set(map(id, params))) == len(params)
    )


def step_fused(
    optimizer: Optimizer, plan: FusedAdam | None, grad_scale: Tensor | None
) -> FusedAdam | None:
    """Step a fused optimizer whose gradients are known to be finite.

    Args:
        plan: what the last call returned for this optimizer, or None.
        grad_scale: gradients are divided by this first, float32, shape (); None: by nothing.

    Returns the plan to keep for the next call.
    """
    groups = [group for group in optimizer.param_groups if group["params"]]
    if not FusedAdam.applies(optimizer):
        plan = None
    elif plan is None or not plan.is_current(optimizer, groups):
        ready = all(_ready(optimizer, group) for group in groups)
        plan = FusedAdam(optimizer, groups) if ready else None
    if plan is not None:
        grads: list[Any] = [[p.grad for p in group["params"]] for group in groups]
        if all(mine.takes(own) for mine, own in zip(plan.groups, grads, strict=True)):
            with torch.no_grad():
                for mine, group, own in zip(plan.groups, groups, grads, strict=True):
                    mine.step(group, own, grad_scale)
            # What an LR scheduler's wrapper of step() sets.
            optimizer._opt_called = True  # type: ignore[attr-defined]
            return plan
    params = parameters_of(optimizer)
    if params and params[0].device.type == "cpu":
        match_layout(params, optimizer.state)
    call_fused(optimizer, grad_scale, None)
    return plan

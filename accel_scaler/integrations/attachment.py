"""The additions of :func:`accel_scaler.attach` to one accelerator, and their removal."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from itertools import product
from operator import itemgetter
from typing import Any

import torch
from accelerate import __version__ as accelerate_version
from accelerate.utils import DistributedType
from torch.nn import Module

from ..async_optimizer import Worker
from ..config import FIELDS, ScalerConfig, checked, environment, merge
from ..devices import device_name, warn_once, warn_where_idle
from ..errors import ConfigError, OrderError, StepError, shown
from ..optimizer_step import Boundary, ReplicaStepper, master_rule, stepper_of
from ..overflow import Fp32Modules, Healer, OverflowExplainer
from ..scaling import GradScaler, gather_objects, has_ranks, is_worldwide
from ..telemetry import make_recorder
from .autocast import add_autocast, restore_forward
from .cpu_float16 import emulate_float16
from .optimizer import ScaledOptimizer, adopt, inner_of, refuse_unsuitable
from .stock_scaler import refuse_other_scalers, refuse_unscaled, scaler_settings

TOGETHER = ("find_overflow", "heal", "on_overflow")
"""Settings that ranks have to share to explain an overflow together."""
OF_A_RANK = (
    *("fp32_modules", "max_consecutive_skips", "telemetry", "log_values"),
    *TOGETHER,
)
"""Settings that may differ by rank: no rank waits for another, and steps and scales stay equal."""


class Attachment:
    """The one new attribute of an accelerator, with everything else that was added to it.

    Holds the accelerator weakly: an optimizer that outlives it does not keep its models.

    Args:
        accelerator: a stock accelerator.
        requested_config: the settings that ``attach`` was given; ``config`` adds the settings of
            the replaced scaler, as far as the precision allows.
        named: fields that a call or the environment names, which outrank the replaced scaler's.

    Raises as :func:`accel_scaler.attach`; nothing was changed then.
    """

    def __init__(
        self,
        accelerator: Any,
        requested_config: ScalerConfig,
        named: Collection[str],
    ) -> None:
        refuse_other_scalers(accelerator)
        self.rank: int = accelerator.process_index
        for text in unlike_launched(accelerator) if self.rank == 0 else ():
            warn_once(text)
        config, precision = requested_config, accelerator.mixed_precision
        refuse_unscaled(config, precision)
        self.scales: bool = precision == "fp16"
        """Losses are scaled; else every window has scale 1."""
        if not self.scales:
            config = replace(config, enabled=False)
        self._accelerator = weakref.ref(accelerator)
        self.stock_scaler = accelerator.scaler
        settings = scaler_settings(accelerator, config, self.stock_scaler, named)
        config = replace(config, **settings)
        self.config, self.requested_config = config, requested_config
        self.is_default = False
        """A later ``attach`` with settings replaces this attachment."""
        self.device: torch.device = accelerator.device
        self.masters = master_rule(config, self.device)
        self.steps_beside = config.step_mode == "overlap" and self.device.type == "cpu"
        """Optimizers that can be split step on the optimizer thread."""
        refuse_unsuitable(accelerator._optimizers, self)
        warn_where_idle(config.step_mode, config.offload, self.device)
        self.fp32_modules = Fp32Modules(config.fp32_modules)
        """Modules that run in float32 once their model is prepared."""
        for model in self.models:
            self.fp32_modules.refuse_uncastable(model)
        self.stock_class = type(accelerator)
        """The class before ``attach``."""
        self.scaler = AttachedScaler(self.device.type, **settings)
        self.scaler.attachment = weakref.ref(self)
        state = {} if self.stock_scaler is None else self.stock_scaler.state_dict()
        if state and self.stock_scaler._scale is not None:
            # Training has begun: go on with its scale, within the new bounds.
            begun = {key: state[key] for key in ("scale", "_growth_tracker")}
            self.scaler.load_state_dict(self.scaler.state_dict() | begun)
        is_fsdp = accelerator.distributed_type == DistributedType.FSDP
        self.scaler.ranks.sharded = config.sharded or is_fsdp
        facts = {
            "rank": self.rank,
            "ranks": accelerator.num_processes,
            "device": self.device.type,
            "device_name": device_name(self.device),
            "precision": str(precision),
            "accelerate": accelerate_version,
            "transformers": getattr(sys.modules.get("transformers"), "__version__", None),
        }
        self.recorder = make_recorder(self.scaler, config, facts)
        self.explainer: OverflowExplainer | None = None
        how, retries = config.finds_overflow, config.on_overflow == "retry" and config.enabled
        if how != "off" or retries:
            healer = Healer(self.fp32_modules) if config.heal else None
            rules = how, config.finds_after, retries
            self.explainer = OverflowExplainer(self.scaler, *rules, healer, self.float16)
        self.boundary = Boundary(
            self.scaler,
            self.device,
            self.explainer,
            self.recorder,
            rerun=None if self.explainer is None else self.explainer.retry,
            skip_nonfinite=config.skip_nonfinite,
            skip_norm_above=config.skip_norm_above,
        )
        self.worker = Worker()
        self.optimizers: weakref.WeakSet[ScaledOptimizer] = weakref.WeakSet()
        """Adopted optimizers; the accelerator drops its own list in ``free_memory``."""
        self.added_autocast = False
        """Models are autocast by this package's doing."""

    @property
    def models(self) -> list[Module]:
        """The models that the accelerator has prepared."""
        accelerator = self._accelerator()
        return [] if accelerator is None else list(accelerator._models)

    def float16(self) -> AbstractContextManager[None]:
        """In the block a CPU without float16 kernels has float16 products."""
        is_needed = self.scales and self.device.type == "cpu"
        return emulate_float16() if is_needed else nullcontext()

    def watch(self, prepared: Module, inner: Module) -> None:
        """Register the parameter names of ``inner``, the model in ``prepared``, and watch it for
        overflows."""
        self.scaler.parameter_names.add_module(inner)
        self.scaler.ranks.watch(prepared)
        if self.explainer is not None:
            self.explainer.watch(prepared, inner)

    def compare_settings(self, prepared: Module) -> None:
        """Let the ranks of a model explain its overflows together if all have the same settings.

        A collective where ``prepared`` is DDP's, or sharded, over all ranks. Raises ``ConfigError``
        on all ranks where a setting differs that steps or scales depend on.
        """
        if not has_ranks() or not is_worldwide(prepared):
            return
        every = gather_objects(asdict(self.config), self.device)
        values = {name: [settings[name] for settings in every] for name in FIELDS}
        differ = [name for name, given in values.items() if given != [given[0]] * len(given)]
        if wrong := [name for name in differ if name not in OF_A_RANK]:
            name = wrong[0]
            raise ConfigError(f"{name}: got {values[name]} on the ranks, expected one for all.")
        if self.explainer is not None:
            self.explainer.meeting.is_everywhere = not set(differ).intersection(TOGETHER)

    def share_scale(self) -> None:
        """Take scale and counters of the rank that has closed the most windows. A collective, after
        ``Join``."""
        if not self.scaler.ranks.are_uneven:
            return
        mine = self.scaler.window.index, self.scaler.read_state()
        answers = gather_objects(mine, self.device)
        self.scaler.write_state(max(answers, key=itemgetter(0))[1])

    def install(self, accelerator: Any) -> None:
        """Install autocast, scaler, names and optimizers; all is undone if one of them fails."""
        accelerator._attachment = self
        try:
            if self.scales and not accelerator.native_amp:
                # Stock Accelerate leaves fp16 on a CPU without autocast and without a scaler.
                accelerator.native_amp = self.added_autocast = True
                for model in self.models:
                    add_autocast(accelerator, model)
            if self.scales:
                accelerator.scaler = self.scaler
            for model in self.models:
                self.fp32_modules.enable(model)
                self.watch(model, accelerator.unwrap_model(model))
            for optimizer in accelerator._optimizers:
                adopt(optimizer, self)
            self.make_ready(accelerator._optimizers)
        except BaseException:
            self._undo(accelerator)
            raise

    def remove(self, accelerator: Any) -> None:
        """Undo :meth:`install`, and give the present scale to the replaced scaler. Raises as
        :func:`accel_scaler.detach`."""
        scaler, stock = self.scaler, self.stock_scaler
        if scaler.is_enabled():
            if scaler.window.opened_by is not None and not scaler.window.closed:
                raise OrderError(
                    "detach: a step is under way, its gradients are scaled. Detach after "
                    "optimizer.step(), or zero the gradients and call "
                    "accelerator.scaler.abandon_window() first."
                )
            if stock is not None and stock.is_enabled():
                stock.load_state_dict(scaler.state_dict())
                if scaler.has_begun and stock._scale is None:
                    # Without its tensor a later attach() would find no state in it.
                    stock._lazy_init_scale_growth_tracker(self.device)
        self._undo(accelerator)

    def _undo(self, accelerator: Any) -> None:
        """Undo the changes to the accelerator, and to prepared models and optimizers."""
        failed: StepError | None = None
        for optimizer in list(self.optimizers):
            try:
                optimizer.leave(self)
            except StepError as error:
                failed = error
        self.fp32_modules.disable()
        if self.added_autocast:
            accelerator.native_amp = False
            for model in self.models:
                restore_forward(accelerator, model)
        accelerator.scaler = self.stock_scaler
        self.worker.stop()
        self.recorder.close()
        if self.explainer is not None:
            self.explainer.close()
        del accelerator._attachment
        accelerator.__class__ = self.stock_class
        if failed is not None:
            raise failed

    def make_ready(self, optimizers: Any) -> None:
        """Make these prepared optimizers ready for their first step."""
        steppers = map(stepper_of, inner_of(optimizers))
        replicas = [stepper for stepper in steppers if isinstance(stepper, ReplicaStepper)]
        for stepper, model in product(replicas, self.models):
            stepper.watch(model)
        for stepper in replicas:
            if stepper.replica.masters.on_host:
                stepper.refresh()  # memory is pinned here, on the training thread, or refused

    def finish(self) -> None:
        """Wait for every step in flight, and write all of the telemetry."""
        try:
            for optimizer in list(self.optimizers):
                optimizer.synchronize()
        finally:
            self.recorder.flush()


class AttachedScaler(GradScaler):
    """A GradScaler with the names of healed modules in its state dict."""

    attachment: weakref.ref[Attachment] | None = None

    def state_dict(self) -> dict[str, Any]:
        """As GradScaler's, and ``fp32_modules``, a list of names, where modules were healed."""
        state, attachment = super().state_dict(), self.attachment and self.attachment()
        healed = list(attachment.fp32_modules.added) if attachment else []
        return state | ({"fp32_modules": healed} if state and healed else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As GradScaler's; modules that the saved run had healed run in float32.

        Raises:
            ConfigError: ``fp32_modules`` is no list of names.
            UnsupportedError: a module that cannot be cast.
        """
        super().load_state_dict(state_dict)
        attachment, names = self.attachment and self.attachment(), state_dict.get("fp32_modules")
        if not (self.is_enabled() and attachment and names):
            return
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError(
                f"scaler state dict: got fp32_modules={shown(names)}, expected a list of module "
                "names."
            )
        attachment.fp32_modules.add(names, attachment.models)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k != "attachment"}


def unlike_launched(accelerator: Any) -> Iterator[str]:
    """Differences between an accelerator and the launcher's environment, a warning each."""
    name = "ACCELERATE_MIXED_PRECISION"
    wanted, got = os.environ.get(name, "no").lower(), accelerator.mixed_precision
    if wanted != got and wanted in ("fp16", "bf16"):
        yield (
            f"mixed_precision: got {got!r} from the script, expected {wanted!r}, as launched "
            f"({name}). The script's holds; take it out there, or launch with {got!r}."
        )
    world = int(os.environ.get("WORLD_SIZE") or 1)
    if world > accelerator.num_processes and "LOCAL_RANK" in os.environ:
        yield (
            f"got an accelerator of {accelerator.num_processes} process, expected {world} "
            "(WORLD_SIZE): each process trains alone, and all write the same files. To train "
            "together on a CPU set ACCELERATE_USE_CPU=true; else start one process."
        )


def attachment_of(accelerator: Any) -> Attachment | None:
    return getattr(accelerator, "_attachment", None)


def requested(
    config: ScalerConfig | Mapping[str, Any] | None, fields: Mapping[str, Any]
) -> tuple[ScalerConfig | None, dict[str, Any]]:
    """The config and the single fields, also from a mapping, of a call of ``attach``. Raises
    ``ConfigError`` for another kind of ``config``, an unknown field, or a wrong value."""
    if isinstance(config, Mapping):
        fields, config = {**config, **fields}, None
    if config is not None and not isinstance(config, ScalerConfig):
        raise ConfigError(
            f"attach: got {shown(config)} as config, expected a ScalerConfig or a mapping of its "
            "fields; single ones are keywords: step_mode='overlap'."
        )
    return config, {name: checked(name, value) for name, value in fields.items()}


def resolved(
    base: ScalerConfig | None, fields: Mapping[str, Any]
) -> tuple[ScalerConfig, Collection[str]]:
    """``base``, by default the environment's config, with ``fields``; and the named fields of both.
    Raises ``ConfigError`` for the environment, and for fields that contradict each other."""
    base, named = (base, {}) if base is not None else merge(environment(os.environ))
    return replace(base, **fields), {*named, *fields}

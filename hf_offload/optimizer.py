"""`OffloadAdam`: AdamW whose fp32 master weights and moments live in host memory, as a `torch.optim.Optimizer`."""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_offload.config import OffloadConfig
from hf_offload.engine import Engine
from hf_offload.engine.gradients import GradientSet
from hf_offload.engine.hyper import check_group
from hf_offload.engine.scaling import Factor, PendingScale
from hf_offload.engine.stats import Stats
from hf_offload.engine.streamed_gradient import StreamedGradient
from hf_offload.engine.tensors import check_parameter
from hf_offload.errors import ConfigError, StateError, UnsupportedError, explain
from hf_offload.state import LiveEntry, load, plain_entry, shows
from hf_offload.timeline import open_timeline

logger = logging.getLogger(__name__)

_EDITED = operator.attrgetter("edited")

_alive: weakref.WeakSet[OffloadAdam] = weakref.WeakSet()


class OffloadAdam(torch.optim.Optimizer):
    """Adam with decoupled (AdamW, the default) or L2 weight decay, stepped by the host's CPU in fp32.

    The device keeps 16-bit (or fp32) weights and gradients; the host keeps fp32 masters, `exp_avg` and `exp_avg_sq`,
    12 bytes a parameter, or fewer by `state_dtype`; a share may stay on the device, see `device_state_bytes`.
    The update is that of Loshchilov & Hutter 2019 (https://arxiv.org/abs/1711.05101), as in `torch.optim.AdamW`. State
    is allocated at the first training forward of an attached model, or at the first step.

    Args:
        params: parameters, named parameters or groups, as any torch optimizer takes; bf16, fp16 or fp32, mixed.
        lr: learning rate; a float or a 0-dim tensor.
        betas: decay rates of the two moments, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: λ.
        decoupled_weight_decay: True: AdamW's decay; False: λθ is added to the gradient.
        maximize: ascend instead of descend.
        amsgrad: here to be refused by name; it is not supported.
        config: settings of the engine; None: the defaults.
        model: what `attach` takes; needed by `schedule="overlapped"`.

    Raises:
        ConfigError: a hyper-parameter or setting outside its range, or nothing to train.
        UnsupportedError: `amsgrad`, complex or other dtypes, unknown devices, parameters with gaps in memory.
        HostMemoryError: the state does not fit into the host's memory; nothing was allocated.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        decoupled_weight_decay: bool = True,
        maximize: bool = False,
        amsgrad: bool = False,
        config: OffloadConfig | None = None,
        model: nn.Module | None = None,
    ) -> None:
        if config is not None and not isinstance(config, OffloadConfig):
            remedy = "Write config=OffloadConfig(...), or OffloadConfig.from_mapping(...) around a dict"
            raise ConfigError(explain("config", config, "not an OffloadConfig", remedy))
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "maximize": maximize,
            "amsgrad": amsgrad,
        }
        self._engine: Engine | None = None
        self._shown: dict[Tensor, dict[str, Tensor]] = {}
        self._entries: list[LiveEntry] = []
        super().__init__(params, defaults)
        if not any(p.requires_grad for p in self._parameters()):
            raise ConfigError(
                explain("params", f"{len(self._parameters())} parameters", "none of them requires a gradient",
                        "Unfreeze what is to be trained (p.requires_grad_(True)) before making the optimizer")
            )  # fmt: skip
        self.config = config or OffloadConfig()
        me = weakref.ref(self)
        self._engine = Engine(self.config, partial(_parameters_of, me), partial(_groups_of, me))
        self._engine.moved = partial(_show_moved, me)
        self._pending = PendingScale()
        self.last_grad_norm: float | None = None
        """L2 norm of the unscaled gradients as last computed by `clip_grad_norm_`."""
        if model is not None:
            try:
                self.attach(model)
            except BaseException:
                self.close()  # whoever keeps the error keeps its frames, and this optimizer with them
                raise
        _alive.add(self)

    # ---- torch.optim.Optimizer's interface

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the new parameters get state at the next step."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_group(group)
            for i, p in enumerate(group["params"]):
                check_parameter(p, i)
        except Exception:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. `in_order`: the weights are new when it returns; `overlapped`: before each unit's forward.

        Learning rates, decay, the loss scale and the clip factor are read now.

        Raises:
            UnsupportedError: a gradient that is sparse or of another dtype or device than its parameter.
            StateError: gradients changed after they were clipped, `optimizer.state` was edited, the attached model has
                new parameters in place of ours, or an earlier step failed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.engine.check_model()
        found = self.engine.gather(self.param_groups)
        self._check_state(found.items.params)
        factor = self._pending.factor(found, self.config.skip_nonfinite)
        if factor.skip:
            self._skip(found, factor)
        elif found.items:
            self._take_step(found, factor)
            if len(self._shown) != self.engine.bound:
                self._fill_state()
        self._pending.clear()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Zeroing in place waits until the gradients have been copied; a pending clip is dropped."""
        self._pending.clear()
        if self._engine is not None and not set_to_none:
            self._engine.wait_gradients()
            if self._engine.zero_gradients():
                for p in self._parameters():  # unfrozen or added since: not streamed yet
                    if p.grad is not None and not isinstance(p.grad, StreamedGradient):
                        p.grad = p.grad.detach().zero_()
                return
        super().zero_grad(set_to_none)
        if self._engine is not None and self._engine.stream is not None:
            self._engine.stream.dropped()

    def state_dict(self) -> dict[str, Any]:
        """As torch's, after waiting for all. Per parameter: `step` and, in its shape, the host tensors `exp_avg`,
        `exp_avg_sq` and the fp32 `master`; with `state_dtype="int8"` codes and scales instead of the first two, see
        `hf_offload.engine.formats`. Of state that stays on a GPU copies, else live views, valid until the next step."""
        self.engine.wait_outsider()
        self.engine.settle_state()
        self._fill_state()
        saved = super().state_dict()
        saved["state"] = {number: plain_entry(entry) for number, entry in saved["state"].items()}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, of any `state_dtype`, or of `torch.optim.AdamW`; tensors are copied, and
        held as `state_dtype` says here. A pending clip is dropped.

        A missing `master` is taken from the weight; one that does not round to the weight follows the weight, at the
        next step, with a warning. A parameter without state starts anew.

        Raises:
            StateError: a state dict that does not fit; nothing was changed.
            HostMemoryError: there is no room for the state; nothing was changed.
        """
        self.engine.wait_all()
        self.engine.settle_state()
        load(self, state_dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadAdam:
        raise UnsupportedError(_no_copy("copy.deepcopy"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(_no_copy("pickle"))

    # ---- what offloading adds

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    @property
    def schedule(self) -> str:
        """The schedule that runs, in full: `overlapped+streamed`, say."""
        return self.engine.schedule

    def attach(self, model: nn.Module) -> None:
        """Hook `model`: each unit's forward waits for that unit's weights. Attaching the same model again is free.

        Raises:
            UnsupportedError: an embedding with sparse gradients, or DataParallel.
            ConfigError: not a module, or one that has none of the parameters.
        """
        if not isinstance(model, nn.Module):
            raise ConfigError(explain("model", type(model).__name__, "not a torch module", "Pass the model itself"))
        self.engine.attach(model)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float | Tensor) -> Tensor:
        """Clip the next step's gradients to a global L2 norm; `.grad` itself stays as it is.

        The factor min(1, max_norm / (norm + 1e-6)) is folded into the host step. Of several calls before one step the
        tightest bound holds; `inf` only reads the norm.

        Returns:
            The norm before clipping (of the unscaled gradients), a 0-dim fp32 tensor on the parameters' device.

        Raises:
            ConfigError: a negative or NaN bound.
            StateError: gradients were added to after an earlier call.
        """
        norm = self._pending.clip(self.engine.gather(self.param_groups), float(max_norm))
        self.last_grad_norm = norm
        return torch.tensor(norm, dtype=torch.float32, device=self._device())

    @torch.no_grad()
    def unscale_(self, inv_scale: float | Tensor) -> Tensor:
        """For a GradScaler: fold the inverse of the loss scale into the next step.

        Returns:
            found_inf, a 0-dim fp32 tensor on the parameters' device: 1.0 where a gradient is inf or NaN.
        """
        found = self._pending.unscale(self.engine.gather(self.param_groups), float(inv_scale))
        return torch.tensor(float(found), dtype=torch.float32, device=self._device())

    def skip_step(self) -> None:
        """For a GradScaler that found an overflow: the step that was due is not taken. Counted in
        `stats().skipped_steps`; what was pending for it is dropped."""
        self.engine.skip(Factor(self._pending.drop(), 1.0, skip=True))
        skips = self.engine.skips
        level = logging.WARNING if skips.alarming else logging.INFO
        logger.log(
            level, "hf_offload: step %d is skipped whole: gradients overflowed under the loss scale (%d skipped so "
            "far, %d in a row).", self.engine.attempts, skips.count, skips.in_a_row,
        )  # fmt: skip

    def synchronize(self) -> None:
        """Return when the device weights are those of the last step."""
        self.engine.wait_outsider()

    def reseed(self) -> int:
        """Make every weight that is no longer its rounded master the master. Returns how many elements changed."""
        return self.engine.reseed()

    def train(self) -> None:
        """Before a training micro-batch: waits for weights that no hook guards."""
        self.engine.wait_unguarded()

    def eval(self) -> None:
        """Before evaluation: waits for all weights."""
        self.engine.wait_outsider()

    def start_timeline(self, path: str) -> None:
        """From now on the phases of each step are recorded, for `stop_timeline` or `close` to write.

        Raises:
            ConfigError: `path` cannot be written.
        """
        self.engine.record_to(open_timeline(path))

    def stop_timeline(self) -> None:
        """Write the timeline, if one is recorded, after the step under way, and record no more."""
        self.engine.record_to(open_timeline(None))

    def stats(self) -> Stats:
        """The figures of the last finished step."""
        return self.engine.stats()

    def close(self) -> None:
        """Finish the step under way, end the threads and free the pinned memory. The state can still be saved.

        Raises:
            StateError: a step failed and the weights may be half stepped; all is freed nevertheless.
        """
        if self._engine is not None:
            self._engine.close()

    def __enter__(self) -> OffloadAdam:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            self.close()
        except StateError:
            if kind is None:  # else somebody is already being told
                raise

    # ---- inside

    def _parameters(self) -> list[Tensor]:
        return list(dict.fromkeys(p for g in self.param_groups for p in g["params"]))

    def _device(self) -> torch.device:
        return next(p.device for g in self.param_groups for p in g["params"])

    @torch.inference_mode(False)
    def _fill_state(self) -> None:
        """Show the host state in `self.state`, where torch keeps it."""
        if len(self._shown) == self.engine.bound:
            return
        fresh = [p for p in self._parameters() if p not in self._shown and self.engine.is_bound(p)]
        shown = {p: self.engine.state_views(p) for p in fresh}
        for p, views in shown.items():
            self.state[p] = LiveEntry(views, self.engine)
        entries = [entry for entry in self.state.values() if isinstance(entry, LiveEntry)]
        # one statement, and last: after an interrupt before it, all of the above is done again
        self._shown, self._entries = {**self._shown, **shown}, entries

    @torch.inference_mode(False)
    def _show_again(self, params: Iterable[Tensor]) -> None:
        """Show the state of `params` where it is now."""
        for p in params:
            entry = self.state.get(p)
            if p in self._shown and isinstance(entry, LiveEntry):
                views = self.engine.state_views(p)
                if not entry.edited or shows(entry, self._shown[p]):  # else the next step says so
                    entry.show(views)
                self._shown[p] = views

    def _check_state(self, params: Iterable[Tensor]) -> None:
        """Refuse a step of parameters whose entry of `self.state` was replaced or taken out by hand."""
        entries = self._entries
        same = len(self.state) == len(entries) and all(map(operator.is_, self.state.values(), entries))
        if same and not any(map(_EDITED, entries)):
            return
        for p in params:
            shown = self._shown.get(p)
            if shown is not None and not shows(self.state.get(p), shown):
                raise StateError(
                    explain("optimizer.state", f"of a parameter of shape {tuple(p.shape)}", "it was replaced by hand, "
                            "but what the step uses is the memory it showed", "Write into its tensors, or call "
                            "load_state_dict; with an empty 'state' in the dict, Adam starts anew")
                )  # fmt: skip

    def _take_step(self, found: GradientSet, factor: Factor) -> None:
        """A step that was not taken, for want of memory or after Ctrl-C, can be asked for again: then the clipping and
        the loss scale that were asked for before it still hold."""
        before = self.engine.steps
        try:
            self.engine.step(self.param_groups, found, factor)
        finally:
            if self.engine.steps != before:
                self._pending.clear()

    def _skip(self, found: GradientSet, factor: Factor) -> None:
        self.engine.skip(factor)
        skips = self.engine.skips
        if skips.worth_a_warning:
            logger.warning(
                "hf_offload: step %d is skipped whole, no weight or state changes: gradients are not finite, of %s "
                "(skip_nonfinite=%r; %d skipped so far, %d in a row).",
                self.engine.attempts, self.engine.not_finite(found), self.config.skip_nonfinite,
                skips.count, skips.in_a_row,
            )  # fmt: skip


def alive() -> list[OffloadAdam]:
    """Every optimizer that there is and that was not closed."""
    return [optimizer for optimizer in list(_alive) if not optimizer.engine.closed]


def _parameters_of(optimizer: weakref.ref[OffloadAdam]) -> list[Tensor]:
    alive = optimizer()
    return alive._parameters() if alive is not None else []


def _show_moved(optimizer: weakref.ref[OffloadAdam], params: Iterable[Tensor]) -> None:
    alive = optimizer()
    if alive is not None:
        alive._show_again(params)


def _groups_of(optimizer: weakref.ref[OffloadAdam]) -> list[dict[str, Any]]:
    alive = optimizer()
    return alive.param_groups if alive is not None else []


def _no_copy(how: str) -> str:
    return explain(
        "optimizer", how, "an OffloadAdam owns threads and pinned memory, which cannot be copied",
        "Copy optimizer.state_dict() and load it into a new OffloadAdam",
    )  # fmt: skip

"""A transformers model as a `stopwatch.Subject`, on a CPU or a GPU: random tokens, and marks in the device's time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_offload.calibration import digest
from hf_offload.config import OffloadConfig
from hf_offload.engine.tensors import WIRE
from hf_offload.engine.units import find_units
from hf_offload.errors import ConfigError, explain
from hf_offload.optimizer import OffloadAdam


def facts(name: str, model: nn.Module, device: str, offload: OffloadConfig, wire: str | None = None) -> dict[str, Any]:
    """What of a model a calibration is kept by: its units, what it is trained in, and on what kind of device.

    Args:
        name: for people; not part of the digest.
        device: its type, cpu or cuda.
        offload: the settings that a host step depends on: its threads, and how it holds the state.
        wire: dtype of the trainable weights; None: each one's own.
    """
    told = {
        "units": [_by_wire([p for p in unit.params if p.requires_grad], wire) for unit in find_units(model).units],
        "frozen": sum(p.numel() for p in model.parameters() if not p.requires_grad),
        "checkpointing": checkpointing(model),
        "device": device,
        "threads": offload.threads,
        "state_dtype": offload.state_dtype,
    }
    return {"name": name, "digest": digest(told), "device": device, "checkpointing": told["checkpointing"]}


def checkpointing(model: nn.Module) -> bool:
    """Whether it computes activations again in the backward. transformers has given that a new name."""
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    return next((bool(getattr(model, name)) for name in names if hasattr(model, name)), False)


def _by_wire(params: Sequence[Tensor], wire: str | None) -> dict[str, int]:
    counts: dict[str, int] = {}
    for p in params:
        name = wire or WIRE.get(p.dtype, str(p.dtype))
        counts[name] = counts.get(name, 0) + p.numel()
    return counts


class ModelSubject:
    """A causal language model that is given random tokens.

    Args:
        model: in training mode, on its device.
        seq_len: tokens of a row.
        autocast: the dtype of torch.autocast, as under bf16 or fp16 training; None: none.
    """

    def __init__(self, model: Any, seq_len: int, autocast: torch.dtype | None = None) -> None:
        self.model = model
        self.seq_len = seq_len
        self._device = next(model.parameters()).device
        self._autocast = autocast
        self._tokens: dict[int, Tensor] = {}
        self._vocabulary = int(model.config.get_text_config().vocab_size)

    def forward(self, rows: int) -> Tensor:
        if rows not in self._tokens:
            made = torch.Generator().manual_seed(0)
            self._tokens[rows] = torch.randint(self._vocabulary, (rows, self.seq_len), generator=made).to(self._device)
        tokens = self._tokens[rows]
        try:
            with self._casting():
                loss: Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        except torch.OutOfMemoryError as error:
            cause = f"a micro-batch of {rows} rows of {self.seq_len} tokens does not fit into the GPU's memory"
            raise ConfigError(explain("--batch", rows, cause, "Give fewer rows, or --checkpointing")) from error
        return loss

    def _casting(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast)

    def mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()  # type: ignore[no-untyped-call]
        return event

    def between(self, first: Any, second: Any) -> float:
        if self._device.type != "cuda":
            return float(second - first)
        return float(first.elapsed_time(second)) * 1e-3

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def settle(self) -> None:
        """Threads run where the system puts them, as in training."""

    def join(self, optimizer: OffloadAdam) -> None:
        """Nothing to tell it."""


def check_room(params: Mapping[str, int], device: str) -> None:
    """Refuse a model whose weights and gradients do not fit on the GPU.

    Args:
        params: bytes of `weights` and `gradients`.

    Raises:
        ConfigError: they do not.
    """
    if device != "cuda":
        return
    free, _ = torch.cuda.mem_get_info()
    need = sum(params.values())
    if need > free:
        cause = f"weights and gradients take {need / 1e9:.1f} GB, and {free / 1e9:.1f} GB of GPU memory are free"
        raise ConfigError(explain("--calibrate", "this model", cause, "End what else uses the GPU"))

"""The peers of `hf-offload bench step`, each as its own users run it, over the shared arrays.

- DeepSpeed, `DeepSpeedCPUAdam` (0.19, `ZeRO-Offload`, stages 1 and 2): one flat float32 master with float32 gradients.
  Its engine lets the GPU cast the gradient and sends 4 bytes over the link
  (`async_inplace_copy_grad_to_fp32_buffer_from_gpu`), and casts the stepped master into a 16-bit host buffer by
  `copy_()`, whole arrays at a time. Given a 16-bit gradient it needs one cast more, which `cast_gradient` says.
  Tile by tile, casts and step in turn, its operator would find the casts' results in the cache. DeepSpeed does not run
  it so; `DeepSpeedTiled` does, as the best that could be made of it.
- torch, `torch.optim.AdamW(fused=True)` over one flat float32 tensor: weights and gradients must be of one dtype, so
  16-bit training with float32 masters needs the same two casts.
- torchao, `CPUOffloadOptimizer`: for each tensor a fused torch AdamW in the parameter's own dtype. Its constructor
  wants a GPU; what its `step()` runs on the host does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_offload.bench.step_adam import HYPER, TAKEN, MissingPeer, Outcome
from hf_offload.bench.step_memory import Memory
from hf_offload.errors import explain

GET = "Install the peers: pip install 'hf-offload[bench]'"

_ADAMW: dict[str, Any] = {
    "lr": HYPER["lr"], "betas": (HYPER["beta1"], HYPER["beta2"]), "eps": HYPER["eps"],
    "weight_decay": HYPER["weight_decay"],
}  # fmt: skip


class Float32Master:
    """One flat float32 parameter whose optimizer's state are the shared arrays.

    Attributes:
        who: the optimizer's name.
        rtol: of master, m and v, as `Contender` has it.
    """

    who: str
    rtol: tuple[float, float, float]

    def __init__(self, memory: Memory, wire: str, *, cast_gradient: bool) -> None:
        self._memory, self._cast_gradient = memory, cast_gradient
        self._grad, self._weight = memory.grad_as(wire), memory.weight_as(wire)
        self._master = nn.Parameter(torch.from_numpy(memory.master))
        self._master.grad = memory.fp32_scratch()
        self._optimizer = self._make([self._master])
        moments = (torch.from_numpy(a) for a in memory.state[1:])
        self._optimizer.state[self._master] = dict(zip(("step", "exp_avg", "exp_avg_sq"), (self._taken(), *moments)))

    def _make(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        raise NotImplementedError

    def _taken(self) -> Any:
        raise NotImplementedError

    def begin(self) -> None:
        if not self._cast_gradient:
            self._fp32_grad.copy_(self._grad)

    @torch.no_grad()
    def step(self) -> None:
        if self._cast_gradient:
            self._fp32_grad.copy_(self._grad)
        self._optimizer.step()
        self._weight.copy_(self._master)

    @property
    def _fp32_grad(self) -> Tensor:
        assert self._master.grad is not None
        return self._master.grad

    def outcome(self) -> Outcome:
        return Outcome(*self._memory.state, self._memory.weight)


class TorchFused(Float32Master):
    """torch's fused AdamW between two casts."""

    who = "torch.optim.AdamW(fused=True)"
    rtol = (1e-6, 1e-6, 1e-6)

    def _make(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, fused=True, **_ADAMW)

    def _taken(self) -> Tensor:
        return torch.tensor(float(TAKEN))


class DeepSpeed(Float32Master):
    """DeepSpeedCPUAdam between two casts. Its C++ op is compiled at first use, a minute.

    It computes 1 - beta2 from the float32 beta2, 1.3e-5 too small: v is off by that, and a step by half of it.
    """

    who = "DeepSpeedCPUAdam"
    rtol = (1e-5, 1e-6, 2e-5)

    def _make(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = _deepspeed_adam(params)
        return made

    def _taken(self) -> int:
        return TAKEN


class DeepSpeedTiled:
    """DeepSpeed's operator, called for tiles whose casts stay in the caches of the threads that share them."""

    TILE = 1 << 16
    """Elements a thread: a quarter of 1 MiB as float32. Of 2^14 to 2^22 the fastest where this was tried."""

    def __init__(self, memory: Memory, wire: str, threads: int) -> None:
        self._memory = memory
        tile = self.TILE * threads
        self._fp32_grad = torch.empty(min(tile, memory.params))
        self._master = torch.from_numpy(memory.master)
        self._optimizer = _deepspeed_adam([nn.Parameter(self._master)])
        whole = (memory.grad_as(wire), memory.weight_as(wire), *map(torch.from_numpy, memory.state))
        self._tiles = list(zip(*(t.split(tile) for t in whole)))
        self._taken = TAKEN

    def begin(self) -> None:
        """Nothing of it is in the scratch."""

    @torch.no_grad()
    def step(self) -> None:
        self._taken += 1
        update, number = self._optimizer.ds_opt_adam.adam_update, self._optimizer.opt_id
        settings = (*HYPER.values(), True)
        for grad, weight, master, m, v in self._tiles:
            fp32_grad = self._fp32_grad[: grad.numel()]
            fp32_grad.copy_(grad)
            update(number, self._taken, *settings, master, fp32_grad, m, v)
            weight.copy_(master)

    def outcome(self) -> Outcome:
        return Outcome(*self._memory.state, self._memory.weight)


class TorchAo:
    """The host's part of torchao's CPUOffloadOptimizer for a bf16 model. Weights, m and v are bfloat16."""

    def __init__(self, memory: Memory) -> None:
        with _importing("torchao"):
            from torchao.optim import CPUOffloadOptimizer
        base = inspect.signature(CPUOffloadOptimizer.__init__).parameters["optimizer_class"].default
        self._memory = memory
        self._weight = nn.Parameter(memory.weight_as("bfloat16"))
        self._weight.grad = memory.grad_as("bfloat16")
        scratch = torch.from_numpy(memory.scratch[: 4 * memory.params]).view(torch.bfloat16)
        self._moments = scratch[: memory.params], scratch[memory.params :]
        # the constructor adds `fused` for this class alone; another default would be another benchmark
        assert base is torch.optim.AdamW
        self._optimizer = base([{"params": self._weight}], fused=True, **_ADAMW)
        state = dict(zip(("step", "exp_avg", "exp_avg_sq"), (torch.tensor(float(TAKEN)), *self._moments)))
        self._optimizer.state[self._weight] = state

    @torch.no_grad()
    def begin(self) -> None:
        """Its own weights and moments, of the values that the float32 state has."""
        for own, shared in zip((self._weight, *self._moments), self._memory.state):
            own.copy_(torch.from_numpy(shared))

    def step(self) -> None:
        self._optimizer.step()

    def outcome(self) -> Outcome:
        master, m, v = (t.detach().float().numpy() for t in (self._weight, *self._moments))
        return Outcome(master, m, v, self._memory.weight)


def _deepspeed_adam(params: list[nn.Parameter]) -> Any:
    """DeepSpeedCPUAdam over `params`. Raises MissingPeer: not installed, or its operator does not build."""
    with _importing("deepspeed"):
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    try:
        with stdout_to_stderr():
            return DeepSpeedCPUAdam(params, adamw_mode=True, **_ADAMW)
    except RuntimeError as error:
        cause = f"its CPU op does not build: {_last_line(error.__cause__ or error)}"
        remedy = "DeepSpeed compiles it at first use: have a C++ compiler and ninja on PATH"
        raise MissingPeer(explain("peer", "deepspeed", cause, remedy)) from error


def versions() -> dict[str, str]:
    """Installed peers."""
    found = {}
    for name in ("deepspeed", "torchao"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@contextlib.contextmanager
def _importing(distribution: str) -> Iterator[None]:
    """Around the import of a peer. Raises MissingPeer where it fails."""
    try:
        with stdout_to_stderr():
            yield
    except Exception as error:  # a peer of another age than its torch fails in many ways
        absent = isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == distribution
        cause = "not installed" if absent else f"does not import: {_last_line(error)}"
        raise MissingPeer(explain("peer", distribution, cause, GET)) from error


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wrong = [line for line in lines if "error:" in line]  # what the compiler said, not that ninja stopped
    return (wrong or lines or [type(error).__name__])[0 if wrong else -1]


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """In here what this process and the compilers it starts print to stdout goes to stderr: stdout is for figures."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        with contextlib.suppress(OSError, TypeError, AttributeError):  # a system whose C library has no such name
            ctypes.CDLL(None).fflush(None)  # printf's own buffer
        os.dup2(kept, 1)
        os.close(kept)

"""Who steps, in `hf-offload bench step`: a registry of small objects.

Each contender does the whole host step: a 16-bit gradient in host memory goes in; updated master, m, v and the 16-bit
weight come out. A new one is a `Contender` in CONTENDERS whose `make` returns a `Stepper`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from hf_offload.bench import step_ours, step_peers
from hf_offload.bench.step_adam import Outcome
from hf_offload.bench.step_memory import Memory

Tolerance = tuple[float, float, float]
"""Of master, m and v."""


class Stepper(Protocol):
    """One contender, bound to memory and threads."""

    def begin(self) -> None:
        """Before its turn, untimed: what others did to the scratch is put right."""
        ...

    def step(self) -> None:
        """The whole host step, timed."""
        ...

    def outcome(self) -> Outcome:
        """What the last step left: float32 master, m and v, and the weight's bits."""
        ...


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One entry of the registry.

    Attributes:
        wire: bfloat16 or float16, of gradient and weight.
        bytes_per_param: the least that its own passes must read and write.
        counted: what is timed, in a sentence.
        make: from memory and thread count to a stepper; raises MissingPeer where it cannot run.
        rtol: how far master, m and v may be from `kernels.cpu.reference` (see `step_check`); 0: the same bits.
        scratch_bytes: bytes a parameter it needs beside the shared arrays.
        ours: whether it is this project's.
        twin: from memory and a number of steps to what they should make; None: `kernels.cpu.reference`'s fp32 AdamW.
        fp32_master: whether the weight is a rounding of a master that it keeps in float32.
    """

    wire: str
    bytes_per_param: float
    counted: str
    make: Callable[[Memory, int], Stepper]
    rtol: Tolerance
    scratch_bytes: int = 0
    ours: bool = False
    twin: Callable[[Memory, int], Outcome] | None = None
    fp32_master: bool = True


def _ours(wire: str, bytes_per_param: float, rtol: Tolerance, scratch_bytes: int = 0) -> Contender:
    return Contender(
        wire=wire,
        bytes_per_param=bytes_per_param,
        counted="One pass: reads master, m, v and the 16-bit gradient, writes master, m, v and the 16-bit weight.",
        make=lambda memory, threads: step_ours.OurFloat32(memory, threads, wire),
        rtol=rtol,
        scratch_bytes=scratch_bytes,
        ours=True,
    )


def _ours_compact(state_dtype: str, wire: str, bytes_per_param: float) -> Contender:
    return Contender(
        wire=wire,
        bytes_per_param=bytes_per_param,
        counted=f"One pass: reads the float32 master, {state_dtype} m and v and the 16-bit gradient, writes master, m "
        "and v, rounded stochastically, and the 16-bit weight.",
        make=lambda memory, threads: step_ours.OurCompact(memory, threads, wire, state_dtype),
        rtol=(0.0, 0.0, 0.0),
        scratch_bytes=step_ours.scratch_bytes(state_dtype),
        ours=True,
        twin=lambda memory, steps: step_ours.twin(memory, wire, state_dtype, steps),
    )


def _with_casts(peer: type[step_peers.Float32Master], wire: str) -> Contender:
    """A peer that steps float32 with float32 gradients, between the two casts that 16-bit training then needs."""
    return Contender(
        wire=wire,
        bytes_per_param=40,
        counted="Three passes over the whole arrays: the gradient cast to float32 (6 B), "
        f"{peer.who} (28 B), the master cast into the weight (6 B); casts by torch's copy_().",
        make=lambda memory, threads: peer(memory, wire, cast_gradient=True),
        rtol=peer.rtol,
        scratch_bytes=4,
    )


def _float32_gradient(peer: type[step_peers.Float32Master], wire: str) -> Contender:
    """The same given the gradient as float32, which is less than the whole work."""
    return Contender(
        wire=wire,
        bytes_per_param=34,
        counted=f"Less work: the gradient is float32 already, as where the GPU casts it and the link carries twice the "
        f"bytes; {peer.who} (28 B), and the master cast into the weight (6 B).",
        make=lambda memory, threads: peer(memory, wire, cast_gradient=False),
        rtol=peer.rtol,
        scratch_bytes=4,
    )


_SAME_BITS = (0.0, 0.0, 0.0)
_DS, _TORCH = step_peers.DeepSpeed, step_peers.TorchFused
CONTENDERS: Mapping[str, Contender] = {
    "ours/float32/bf16": _ours("bfloat16", 28, _SAME_BITS),
    "ours/float32/fp16": _ours("float16", 28, _SAME_BITS),
    "ours/bfloat16/bf16": _ours_compact("bfloat16", "bfloat16", 20),
    "ours/int8/bf16": _ours_compact("int8", "bfloat16", 16 + 4 / 128),
    "deepspeed/bf16": _with_casts(_DS, "bfloat16"),
    "deepspeed/fp16": _with_casts(_DS, "float16"),
    "deepspeed_fp32grad/bf16": _float32_gradient(_DS, "bfloat16"),
    "deepspeed_tiled/bf16": Contender(
        wire="bfloat16",
        bytes_per_param=28,
        counted="The whole work, as DeepSpeed does not run it: its operator for tiles that fit the second cache, with "
        "the casts before and after each, so that memory is passed over once (28 B).",
        make=lambda memory, threads: step_peers.DeepSpeedTiled(memory, "bfloat16", threads),
        rtol=_DS.rtol,
    ),
    "torch_fused/bf16": _with_casts(_TORCH, "bfloat16"),
    "torch_fused/fp16": _with_casts(_TORCH, "float16"),
    "torchao/bf16": Contender(
        wire="bfloat16",
        bytes_per_param=14,
        counted="Other work: what CPUOffloadOptimizer.step() runs on the host for a bf16 model, one fused AdamW over "
        "bf16 weights with bf16 m and v. There is no float32 master.",
        make=lambda memory, threads: step_peers.TorchAo(memory),
        rtol=(2.0**-6, 2.0**-6, 2.0**-6),  # bf16 rounds by 2^-9; at first, and in each of two steps
        scratch_bytes=4,
        fp32_master=False,
    ),
}

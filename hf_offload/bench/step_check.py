"""Before a contender of `hf-offload bench step` is timed: does it do the whole work?"""

from __future__ import annotations

import dataclasses

import numpy as np

from hf_offload.bench import step_memory
from hf_offload.bench.step_adam import HYPER, TAKEN, Outcome
from hf_offload.bench.step_contenders import Contender
from hf_offload.errors import OffloadError, explain
from hf_offload.kernels import cpu
from hf_offload.kernels.cpu import reference

PARAMS = 200_003
"""Enough that every contender runs in parallel, and in several tiles on two threads; odd, so that tails run, too."""

STEPS = 2


class WrongResult(OffloadError):
    """A contender's step is not AdamW's."""


def check(name: str, contender: Contender, threads: int) -> None:
    """Take STEPS steps, and compare what they leave with the kernels' NumPy twin.

    `contender.rtol` bounds the differences of master, m and v, element by element, relative to what they would be if
    nothing cancelled: to the same steps of the absolute values of everything. And the weight must be the contender's
    own master, rounded to nearest even, bit for bit.

    Raises:
        MissingPeer: it cannot run here.
        WrongResult: it differs.
    """
    memory = step_memory.make(PARAMS, contender.scratch_bytes, threads)
    wanted, scale = _twin(memory, contender.wire), _twin(_one_sign(memory), contender.wire)
    if contender.twin is not None:
        wanted = contender.twin(memory, STEPS)
    stepper = contender.make(memory, threads)
    stepper.begin()
    memory.weight[:] = 0 if contender.fp32_master else memory.weight
    for _ in range(STEPS):
        stepper.step()
    found = stepper.outcome()
    for part, rtol in zip(("master", "exp_avg", "exp_avg_sq"), contender.rtol):
        off = np.abs(getattr(found, part).astype(np.float64) - getattr(wanted, part)) / np.abs(getattr(scale, part))
        if not (worst := float(off.max())) <= rtol:
            raise WrongResult(_sentence(name, f"{part} is off by {worst:.3g}, more than {rtol:.3g}"))
    rounded = reference.narrowed(found.master, contender.wire)
    wrong = int((rounded != found.weight).sum())
    if wrong:
        raise WrongResult(_sentence(name, f"{wrong} of {PARAMS} weights are not the rounded master"))


def _twin(memory: step_memory.Memory, wire: str) -> Outcome:
    theta, m, v = (a.copy() for a in memory.state)
    weight, bounds = np.zeros(PARAMS, np.uint16), np.array([0, PARAMS], np.int64)
    for taken in range(TAKEN, TAKEN + STEPS):
        row = cpu.coefficients(**HYPER, step=taken + 1, grad_scale=1.0, decoupled=True, maximize=False)
        reference.adam_step(theta, m, v, memory.grad, weight, bounds, row[None], wire=wire)
    return Outcome(theta, m, v, weight)


def _one_sign(memory: step_memory.Memory) -> step_memory.Memory:
    """|master|, and gradient and m turned negative: every sum is then of numbers of one sign."""
    negative = {"exp_avg": -np.abs(memory.exp_avg), "grad": memory.grad | np.uint16(0x8000)}
    return dataclasses.replace(memory, master=np.abs(memory.master), **negative)


def _sentence(name: str, cause: str) -> str:
    return explain(
        "contender", name, f"{cause}, after {STEPS} steps", "It is not timed; report it with `hf-offload env`"
    )

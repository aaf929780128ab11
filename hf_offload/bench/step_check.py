"""Before a contender of `hf-offload bench step` is timed: does it do the whole work?"""

from __future__ import annotations

import numpy as np

from hf_offload.bench import step_memory
from hf_offload.bench.step_adam import HYPER, TAKEN, Outcome
from hf_offload.bench.step_contenders import Contender
from hf_offload.errors import OffloadError, explain
from hf_offload.kernels import cpu
from hf_offload.kernels.cpu import reference
from hf_offload.kernels.cpu.wire import Array

PARAMS = 70_003
"""Enough that every contender runs in parallel; odd, so that tails are run, too."""

STEPS = 2


class WrongResult(OffloadError):
    """A contender's step is not AdamW's."""


def check(name: str, contender: Contender, threads: int) -> None:
    """Take STEPS steps, and compare what they leave with the kernels' NumPy twin.

    `contender.rtol` bounds the differences of master, m and v: each, element by element, relative to the twin's plus
    the twin's root mean square (where m is near 0, it is a difference of two numbers that are not). And the weight must
    be the contender's own master, rounded to nearest even, bit for bit, where it keeps one.

    Raises:
        MissingPeer: it cannot run here.
        WrongResult: it differs.
    """
    memory = step_memory.make(PARAMS, contender.scratch_bytes, threads)
    wanted = _twin(memory, contender.wire)
    stepper = contender.make(memory, threads)
    stepper.begin()
    memory.weight[:] = 0 if contender.fp32_master else memory.weight
    for _ in range(STEPS):
        stepper.step()
    found = stepper.outcome()
    for part, rtol in zip(("master", "exp_avg", "exp_avg_sq"), contender.rtol):
        _compare(name, part, getattr(found, part), getattr(wanted, part), rtol)
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


def _compare(name: str, part: str, found: Array, wanted: Array, rtol: float) -> None:
    scale = np.abs(wanted) + np.sqrt(np.mean(np.square(wanted, dtype=np.float64)))
    worst = float(np.max(np.abs(found.astype(np.float64) - wanted) / scale))
    if not worst <= rtol:
        raise WrongResult(_sentence(name, f"{part} is off by {worst:.3g}, more than {rtol:.3g}"))


def _sentence(name: str, cause: str) -> str:
    return explain(
        "contender", name, f"{cause}, after {STEPS} steps", "It is not timed; report it with `hf-offload env`"
    )

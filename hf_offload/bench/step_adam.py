"""What all contenders of `hf-offload bench step` compute: one AdamW, and what a step of it leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from hf_offload.config import OffloadConfig
from hf_offload.errors import UnsupportedError
from hf_offload.kernels.cpu.wire import Array

TAKEN = 99
"""Steps taken before the first one here: bias corrections as in the midst of training."""


BUCKET_BYTES = OffloadConfig().bucket_bytes
"""On the wire: ours steps bucket by bucket, as the engine does."""


class Hyper(TypedDict):
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


HYPER: Hyper = {"lr": 1e-5, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
"""Decoupled weight decay."""


@dataclass(frozen=True)
class Outcome:
    """float32[n] each, and the weight's bits, uint16[n]."""

    master: Array
    exp_avg: Array
    exp_avg_sq: Array
    weight: Array


class MissingPeer(UnsupportedError):
    """A contender that cannot run here: what is missing, and how to get it."""

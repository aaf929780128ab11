"""Kernels on an NVIDIA GPU by CuPy, which is imported at first use. Addresses in, no torch."""

from hf_offload.kernels.cuda.adam import STEP, STEP_STATE, WRITE_WEIGHTS, AdamSteps
from hf_offload.kernels.cuda.reduce import CompileError, SquareSums

__all__ = ["STEP", "STEP_STATE", "WRITE_WEIGHTS", "AdamSteps", "CompileError", "SquareSums"]

"""What a training loop asks for and an offloaded optimizer cannot give: seen early, said clearly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hf_offload.errors import UnsupportedError, explain


def refuse_unsupported(accelerator: Any, args: Any = None) -> None:
    """Refuse what shards or replicates parameters in ways that host-resident state cannot follow.

    Args:
        accelerator: accelerate's Accelerator.
        args: transformers' TrainingArguments, where there are any.

    Raises:
        UnsupportedError: DeepSpeed, FSDP (1 and 2), Megatron-LM, XLA or torch.nn.DataParallel.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    deepspeed, fsdp = (getattr(accelerator.state, f"{name}_plugin", None) for name in ("deepspeed", "fsdp"))
    asked_deepspeed, asked_fsdp = (getattr(args, name, None) for name in ("deepspeed", "fsdp"))
    n_gpu = 1 if args is None else args.n_gpu
    if kind == "DEEPSPEED" or deepspeed is not None or asked_deepspeed:
        cause = "DeepSpeed brings its own optimizer and its own offload"
        remedy = "Leave DeepSpeed out (hf_offload needs no engine), or choose another optim"
        raise UnsupportedError(explain("deepspeed", asked_deepspeed or kind, cause, remedy))
    if kind == "FSDP" or fsdp is not None or asked_fsdp:
        name = f"FSDP{getattr(fsdp, 'fsdp_version', 1)}"
        cause = f"{name} replaces the parameters by shards, which hf_offload does not support yet"
        remedy = "Launch with plain DDP (torchrun, or accelerate launch without FSDP), or choose another optim"
        raise UnsupportedError(explain("fsdp", asked_fsdp or name, cause, remedy))
    if kind in ("MEGATRON_LM", "XLA"):
        cause = "hf_offload runs on one device per process, alone or under DDP"
        raise UnsupportedError(explain("distributed_type", kind, cause, "Use DDP, or choose another optim"))
    if n_gpu > 1:
        cause = "with several GPUs in one process Trainer uses torch.nn.DataParallel, which copies the model each step"
        remedy = "Set CUDA_VISIBLE_DEVICES to one GPU, or launch one process per GPU (torchrun, accelerate launch)"
        raise UnsupportedError(explain("n_gpu", n_gpu, cause, remedy))


def clip_target(optimizers: Sequence[Any], parameters: Sequence[Tensor], norm_type: float) -> Any:
    """The optimizer that a call of `clip_grad_norm_(parameters)` means.

    Args:
        optimizers: the OffloadAdams there are, at least one.
        parameters: what the caller passed; only those that have a gradient count.

    Returns:
        The one whose gradients are exactly those of `parameters`; None where `parameters` has gradients, and all are
        those of others.

    Raises:
        UnsupportedError: some of an optimizer's gradients, or more than one optimizer's; a norm other than L2.
    """
    given = {id(p) for p in parameters if p.grad is not None}
    owned = [{id(p) for g in o.param_groups for p in g["params"] if p.grad is not None} for o in optimizers]
    touched = [i for i, ids in enumerate(owned) if ids & given]
    if given and not touched:
        return None
    if float(norm_type) != 2.0:
        cause = "hf_offload folds the clip factor of the L2 norm into the step, and knows no other norm"
        raise UnsupportedError(explain("norm_type", norm_type, cause, "Leave norm_type out"))
    if not given and len(optimizers) == 1 and not owned[0]:
        return optimizers[0]  # no gradients at all: their norm is 0
    if len(touched) == 1 and owned[touched[0]] == given:
        return optimizers[touched[0]]
    left_out = sum(len(owned[i] - given) for i in touched or range(len(owned)))
    strange = len(given - set().union(*owned))
    parts = [
        f"{left_out} parameters of the optimizer have gradients but are left out" if left_out else "",
        f"{strange} parameters with gradients belong to no OffloadAdam" if strange else "",
        f"the parameters belong to {len(touched)} optimizers" if len(touched) > 1 else "",
    ]
    cause = "the clip factor is folded into the step of the whole optimizer, and " + ", ".join(filter(None, parts))
    remedy = "Pass all parameters of the optimizer and no others (model.parameters()), once per optimizer"
    raise UnsupportedError(explain("clip_grad_norm_ parameters", f"{len(parameters)} tensors", cause, remedy))

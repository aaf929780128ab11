"""`optimizer.stats()`, put together from what each part of the engine knows."""

from __future__ import annotations

from collections.abc import Sequence

from hf_offload.engine.arena import Arena
from hf_offload.engine.formats import MOMENTS
from hf_offload.engine.placement import Placement
from hf_offload.engine.speculation import Speculation
from hf_offload.engine.stats import Stats, StepRecord
from hf_offload.engine.streaming import GradientStream
from hf_offload.timeline import PHASES


def figures(
    placement: Placement, arenas: Sequence[Arena], record: StepRecord | None, stream: GradientStream | None,
    speculation: Speculation | None, *, schedule: str, steps: int, skipped_steps: int, peak_gradient_bytes: int,
) -> Stats:  # fmt: skip
    """The figures of the step of `record`; zeros where there is none yet.

    Args:
        peak_gradient_bytes: the most that the device held of gradients that do not leave during backward.
    """
    numel = sum(a.plan.numel for a in arenas)
    wires = {s.wire for a in arenas for s in a.specs if s.numel}
    return Stats(
        params=numel,
        wire_dtype="mixed" if len(wires) > 1 else next(iter(wires), "bfloat16"),
        schedule=schedule,
        transport=placement.kind_of_transport,
        device_bytes={
            "weights": sum(p.nbytes for a in arenas for p in a.params),
            "gradients": peak_gradient_bytes + (stream.peak if stream is not None else 0),
            "optimizer": sum(a.device_bytes for a in arenas),
        },
        host_bytes={
            **{name: sum(a.nbytes[name] for a in arenas) for name in ("master", *MOMENTS)},
            "pinned": placement.pinned_bytes,
            "store": stream.nbytes if stream is not None else 0,
            "shadow": speculation.nbytes if speculation is not None else 0,
        },
        d2h_bytes=record.d2h_bytes if record else 0,
        h2d_bytes=record.h2d_bytes if record else 0,
        seconds=record.seconds() if record else dict.fromkeys(PHASES, 0.0),
        exposed_seconds=record.exposed if record else 0.0,
        hidden_fraction=record.hidden_fraction() if record else 0.0,
        step=record.step if record else 0,
        steps=steps,
        skipped_steps=skipped_steps,
        speculation_hits=speculation.hits if speculation is not None else 0,
        speculation_misses=speculation.misses if speculation is not None else 0,
    )

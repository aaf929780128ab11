"""When what happens: the bucket plan, the host state, the schedules, the waits."""

from hf_offload.engine.engine import Engine

__all__ = ["Engine"]

"""What this process runs on: versions, processor, memory, GPU. Stdlib only, but for `facts`, which asks torch too."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from typing import Any

from hf_offload import __version__, hostmem
from hf_offload.ranks import local_ranks

_DISTRIBUTIONS = (
    "torch",
    "transformers",
    "accelerate",
    "numba",
    "numpy",
    "datasets",
    "trl",
    "peft",
    "cupy-cuda12x",
    "cupy-cuda13x",
)


def versions() -> dict[str, str]:
    """Installed versions by distribution; those that are not installed are left out."""
    found = {"hf_offload": __version__, "python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def processor() -> str:
    """The processor's name as the system gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.lower().startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores this process may run on: the affinity mask where the system has one."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpus() -> list[tuple[str, int]]:
    """Name and memory in bytes of each NVIDIA GPU; none where there is no driver.

    torch knows best, which one it may use included, but is asked only if it is loaded already; else `nvidia-smi` is.
    """
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda"):
        if not torch.cuda.is_available():
            return []
        properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return [(p.name, int(p.total_memory)) for p in properties]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        rows = [line.rsplit(",", 1) for line in answer.splitlines() if line.strip()]
        return [(name.strip(), int(mib) << 20) for name, mib in rows]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def hardware() -> dict[str, Any]:
    """The machine, as plain data: for the summary of a run."""
    memory = hostmem.available_host_bytes()
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "host_bytes_total": memory.total,
        "host_bytes_available": memory.available,
        "host_bytes_source": memory.source,
        "gpus": [{"name": name, "bytes": size} for name, size in gpus()],
        "system": platform.platform(),
    }


def facts() -> dict[str, str]:
    """Everything a bug report should say, as text by name."""
    import torch

    found = versions()
    found["torch built for"] = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    found["GPU"] = ", ".join(f"{name} ({size / 1e9:.1f} GB)" for name, size in gpus()) or "none"
    found["processor"] = processor()
    found["cores"] = f"{usable_cores()} usable of {os.cpu_count()} (affinity)"
    found["host step threads"] = _step_threads()
    found.update(_host_memory())
    found["ranks on this node"] = str(local_ranks())
    found["numba threads"], found["numba layer"] = _numba()
    found["--optim offload_adam"] = _autoload()
    found["system"] = platform.platform()
    return found


def _host_memory() -> dict[str, str]:
    """Every limit on it, the tightest first, and on what of it may be pinned."""
    limits = hostmem.host_limits()
    found = {"host memory": "not known"}
    for number, memory in enumerate(limits):
        name = f"host limit {number + 1}" if number else "host memory"
        found[name] = f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB available ({memory.source})"
    locked = hostmem.lockable_bytes()
    found["locked memory"] = f"{'no limit' if locked is None else f'{locked} bytes'} (ulimit -l)"
    return found


def _step_threads() -> str:
    """How many threads the host step takes if none are asked for, and why."""
    from hf_offload.engine.step_threads import step_threads

    return str(step_threads())


def _numba() -> tuple[str, str]:
    """Threads the kernels may use, and the threading layer, which numba chooses when a parallel kernel first runs."""
    import numpy as np

    from hf_offload.kernels import cpu
    from hf_offload.kernels.cpu import jit

    threads = cpu.max_threads()
    cpu.checksum(np.zeros(1 << 22, dtype=np.uint16), threads)
    try:
        return str(threads), str(jit.numba.threading_layer())
    except ValueError:
        return str(threads), "not started (one thread needs none)"


def _autoload() -> str:
    """Whether scripts that never heard of hf_offload know the flag."""
    from hf_offload import autoload

    entries = importlib.metadata.entry_points(group="torch.backends")
    if not any(entry.value.startswith("hf_offload.") for entry in entries):
        return "known to scripts that import hf_offload (not installed with pip)"
    if os.environ.get(autoload.SWITCH, "1").strip().lower() in autoload.OFF:
        return f"known to scripts that import hf_offload ({autoload.SWITCH} turns autoload off)"
    return "known to every script (autoload active)"

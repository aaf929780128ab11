"""Which CPUs are next to a GPU, and work done on them. Linux; elsewhere, and on one node, nothing happens. Stdlib only.

Memory comes to the NUMA node of the thread that first writes it, and a new thread may run where its creator may. So
what is written, and the threads that are started, while the calling thread is kept to one node's CPUs, stay there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_offload import procfs
from hf_offload.cpus import affinity, physical


def cpus_near(pci_address: str, root: Path = Path("/")) -> frozenset[int]:
    """The CPUs of the NUMA node of a PCI device; empty where there is one node or the system does not tell.

    Args:
        pci_address: "0000:17:00.0": domain, bus, device, function. It names a GPU whatever CUDA_VISIBLE_DEVICES says.
        root: where /sys is found (tests use made-up trees).
    """
    nodes = root / "sys" / "devices" / "system" / "node"
    if len(procfs.numbers(procfs.text(nodes / "online"))) < 2:
        return frozenset()
    node = procfs.number(root / "sys" / "bus" / "pci" / "devices" / pci_address.lower() / "numa_node")  # -1: not known
    return frozenset() if node is None else procfs.numbers(procfs.text(nodes / f"node{node}" / "cpulist"))


def home_of(pci_address: str, threads: int, root: Path = Path("/")) -> frozenset[int]:
    """Where `threads` threads should run for a GPU: those CPUs of its node that this process may use.

    Empty, so anywhere, where they are not enough for a core each: then the step has the memory of several nodes for
    itself, and that is faster than one node's near the GPU.
    """
    home = cpus_near(pci_address, root) & affinity(0)
    return home if threads <= physical(home, root) else frozenset()


@contextmanager
def kept_to(cpus: frozenset[int]) -> Iterator[None]:
    """In here the calling thread, and for good every thread that it starts, runs on `cpus`; empty: as before."""
    before = affinity(0)
    if not cpus or not before or not _bind(cpus):
        yield
        return
    try:
        yield
    finally:
        _bind(before)


def _bind(cpus: frozenset[int]) -> bool:
    """Returns whether the system let the calling thread be kept to `cpus`."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:  # a cpuset that shrank meanwhile, or a sandbox
        return False
    return True

"""What saving and loading the optimizer's state takes of memory and time.

    python -m hf_offload.bench.checkpoint --params 1e9 --out benchmarks/checkpoint.json

One optimizer over bf16 parameters takes a step, is saved as a Trainer's checkpoint is (a stream into `optimizer.pt`,
hashed and synced), verified, and loaded into itself again from the mapped file. RssAnon, this process's memory that
no file backs, is read every 2 ms: page cache of the file is not in it, since the kernel takes that back at need.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_offload import OffloadAdam, OffloadConfig, environment, planning
from hf_offload.checkpoint import manifest, torch_file

TENSOR = 10_000_000
"""Elements of a parameter."""
SAMPLE_S = 0.002


def run(params: int, folder: Path) -> dict[str, Any]:
    """Figures of one optimizer with `params` bf16 parameters; `folder` gets its checkpoint, 12 bytes each."""
    sizes = [TENSOR] * (params // TENSOR) + ([params % TENSOR] if params % TENSOR else [])
    weights = [nn.Parameter(torch.full((n,), 0.5, dtype=torch.bfloat16)) for n in sizes]
    optimizer = OffloadAdam(weights, lr=1e-3, config=OffloadConfig(schedule="in_order"))
    for p in weights:
        p.grad = torch.full_like(p, 0.01)
    optimizer.step()
    optimizer.zero_grad()
    before = rss_anon()
    path = folder / "optimizer.pt"

    def save() -> None:
        digest = torch_file.write(optimizer.state_dict(), path)
        manifest.write(folder, {"optimizer.pt": digest}, None)

    phases = {
        "save": watched(save),
        "verify": watched(lambda: manifest.verify(folder)),
        "load": watched(lambda: optimizer.load_state_dict(torch_file.read(path))),
    }
    after = rss_anon()
    optimizer.close()
    return {
        "params": params,
        "file_bytes": path.stat().st_size,
        "rss_anon_bytes": {
            "before": before, **{f"peak_{name}": peak for name, (_, peak) in phases.items()}, "after": after,
        },
        "peak_over_before": {name: peak / before for name, (_, peak) in phases.items()},
        "seconds": {name: seconds for name, (seconds, _) in phases.items()},
        "machine": environment.hardware(),
        "versions": environment.versions(),
    }  # fmt: skip


def rss_anon() -> int:
    """Bytes of this process in memory that no file backs (Linux)."""
    with open("/proc/self/status", encoding="utf-8") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def watched(work: Callable[[], Any]) -> tuple[float, int]:
    """Seconds that `work` took, and the peak of RssAnon meanwhile."""
    peak, ended = rss_anon(), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(SAMPLE_S):
            peak = max(peak, rss_anon())

    thread = threading.Thread(target=watch)
    thread.start()
    begun = time.perf_counter()
    try:
        work()
    finally:
        seconds = time.perf_counter() - begun
        ended.set()
        thread.join()
    return seconds, max(peak, rss_anon())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hf_offload.bench.checkpoint", description=(__doc__ or "")[:80])
    parser.add_argument("--params", default="1e9", help="how many parameters, as 1e9 or 135M")
    parser.add_argument("--out", type=Path, help="a JSON file; default: printed")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.out.parent if given.out else None) as folder:
        found = run(planning.parse_count("--params", given.params), Path(folder))
    text = json.dumps(found, indent=2) + "\n"
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()

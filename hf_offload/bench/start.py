"""What it takes to begin: the import, an optimizer's construction, the kernels' compilation.

    python -m hf_offload.bench.start --params 1e9 --json

Each in fresh interpreters, medians in milliseconds. Construction: an optimizer of that many bf16 parameters, whose
state it must neither allocate nor touch; RssAnon before and after. Kernels: a first step with an empty cache of
compiled kernels, and again with the one that it left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_offload import environment, planning

IMPORT = """
import json, sys, time
before, begun = set(sys.modules), time.perf_counter()
import hf_offload
took = time.perf_counter() - begun
print(json.dumps({"ms": took * 1e3, "modules": sorted(m for m in set(sys.modules) - before if "." not in m)}))
"""
CONSTRUCTION = """
import json, time, torch
from hf_offload import OffloadAdam, OffloadConfig, hostmem
PIECE = 10_000_000
sizes = [PIECE] * ({params} // PIECE) + [{params} % PIECE or 1]
weights = [torch.nn.Parameter(torch.empty(n, dtype=torch.bfloat16)) for n in sizes]
OffloadAdam(weights[-1:], config=OffloadConfig(bucket_bytes=64)).close()
before, begun = hostmem.own_bytes(), time.perf_counter()
optimizer = OffloadAdam(weights)
took = time.perf_counter() - begun
print(json.dumps({{"ms": took * 1e3, "rss_anon_bytes": hostmem.own_bytes() - before}}))
optimizer.close()
"""
FIRST_STEP = """
import json, time, torch
from hf_offload import OffloadAdam
p = torch.nn.Parameter(torch.ones(100_000, dtype=torch.bfloat16))
p.grad = torch.ones_like(p)
optimizer = OffloadAdam([p])
begun = time.perf_counter()
optimizer.step()
print(json.dumps({"ms": (time.perf_counter() - begun) * 1e3}))
optimizer.close()
"""


def run(params: int, repeats: int) -> dict[str, Any]:
    """Figures of all three."""
    imports = [_fresh(IMPORT) for _ in range(repeats)]
    constructed = [_fresh(CONSTRUCTION.format(params=params)) for _ in range(repeats)]
    with tempfile.TemporaryDirectory() as folder:
        first, again = (_fresh(FIRST_STEP, NUMBA_CACHE_DIR=folder) for _ in range(2))
    return {
        "import": {"ms": _median(imports), "modules": imports[0]["modules"]},
        "construction": {"params": params, "ms": _median(constructed),
                         "rss_anon_bytes": max(found["rss_anon_bytes"] for found in constructed)},
        "first_step": {"ms_compiling": first["ms"], "ms_cached": again["ms"]},
        "machine": environment.hardware(),
        "versions": environment.versions(),
    }  # fmt: skip


def _fresh(code: str, **environ: str) -> Any:
    """What `code` prints as JSON in a new interpreter that finds this package where this one did."""
    place = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(p for p in (place, os.environ.get("PYTHONPATH", "")) if p)
    env: Mapping[str, str] = {**os.environ, "PYTHONPATH": path, **environ}
    done = subprocess.run([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def _median(found: Sequence[Mapping[str, float]]) -> float:
    return statistics.median(each["ms"] for each in found)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m hf_offload.bench.start", description=(__doc__ or "")[:80])
    parser.add_argument("--params", default="1e9", help="parameters of the optimizer that is made, as 1e9 or 135M")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON instead of three lines")
    given = parser.parse_args(arguments)
    found = run(planning.parse_count("--params", given.params), given.repeats)
    if given.json:
        print(json.dumps(found, indent=2))
        return
    made, first = found["construction"], found["first_step"]
    print(f"import hf_offload: {found['import']['ms']:.1f} ms")
    print(f"construction, {made['params']:,} parameters: {made['ms']:.1f} ms, {made['rss_anon_bytes'] / 1e6:.1f} MB")
    print(f"first step: {first['ms_compiling']:.0f} ms with kernels to compile, {first['ms_cached']:.0f} ms without")


if __name__ == "__main__":
    main()

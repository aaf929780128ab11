"""Exact AdamW whose fp32 master weights and moments live in host memory, for Hugging Face Trainer and accelerate.

Importing this package imports neither torch nor transformers nor numba: every public name is loaded at first use.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# In a raw checkout the sub-packages kernels/, callbacks/ and recipes/ lie beside this folder, not inside it.
_here = Path(__file__).resolve().parent
if not (_here / "kernels").is_dir() and (_here.parent / "kernels" / "cpu").is_dir():
    __path__.append(str(_here.parent))

if TYPE_CHECKING:
    from hf_offload.config import OffloadConfig
    from hf_offload.optimizer import OffloadAdam
    from hf_offload.plugin import OffloadAccelerator, OffloadPlugin
    from hf_offload.trainer import OffloadTrainer, OffloadTrainerMixin

_HOME = {
    "OffloadAdam": "hf_offload.optimizer",
    "OffloadConfig": "hf_offload.config",
    "OffloadTrainer": "hf_offload.trainer",
    "OffloadTrainerMixin": "hf_offload.trainer",
    "OffloadPlugin": "hf_offload.plugin",
    "OffloadAccelerator": "hf_offload.plugin",
}

__all__ = [
    "OffloadAccelerator",
    "OffloadAdam",
    "OffloadConfig",
    "OffloadPlugin",
    "OffloadTrainer",
    "OffloadTrainerMixin",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'hf_offload' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


from hf_offload import autoload as _autoload  # noqa: E402  (needs the __path__ set above)

_autoload.install()

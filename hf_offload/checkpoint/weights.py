"""The model's weights in a checkpoint's safetensors files: listed, read by mapping them, and written as a stream.

The format (https://github.com/huggingface/safetensors): 8 bytes, little-endian, the length of a JSON header; it,
`{"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...}`; then the tensors, without gaps.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_offload.checkpoint.digest import Digest
from hf_offload.checkpoint.manifest import remedy_for
from hf_offload.checkpoint.torch_file import hashed
from hf_offload.errors import CheckpointError, explain

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
_MAX_HEADER = 100_000_000  # the format's own limit, bytes

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Weight:
    """Where one tensor lies.

    Attributes:
        file: its safetensors file.
        dtype: as safetensors writes it: "BF16", "F32" ...
        start, stop: bytes from the start of the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def read(self) -> Tensor:
        """The tensor, as a view of the mapped file.

        Raises:
            CheckpointError: its dtype is not known here, or the file got shorter.
        """
        if self.dtype not in DTYPES:
            cause = f"a tensor in it has the dtype {self.dtype}, which is not known here"
            raise CheckpointError(explain("file", str(self.file), cause, "Upgrade hf-offload"))
        dtype = DTYPES[self.dtype]
        if self.numel == 0:
            return torch.empty(self.shape, dtype=dtype)
        try:
            status = self.file.stat()
            mapped = _mapped(self.file, status.st_mtime_ns, status.st_size)
            # its storage is this tensor's bytes alone: torch.save writes a storage whole
            part = torch.frombuffer(mapped, dtype=torch.uint8, offset=self.start, count=self.stop - self.start)
        except (OSError, ValueError) as error:
            raise _damaged(self.file, f"it cannot be read: {error}") from None
        if self.start % dtype.itemsize:  # headers of other writers need not be padded
            part = part.clone()
        return part.view(dtype).view(self.shape)


@lru_cache(maxsize=4)
def _mapped(file: Path, changed_ns: int, size: int) -> mmap.mmap:
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants memory that it could write to


def files(folder: Path) -> list[Path]:
    """The files with the weights of the model or of its adapter; empty: there are none.

    Raises:
        CheckpointError: the index of a sharded model is damaged or names files outside the folder.
    """
    if (folder / INDEX).is_file():
        return [folder / name for name in _shards(folder / INDEX)]
    return [folder / name for name in (WEIGHTS, ADAPTER) if (folder / name).is_file()]


def listed(folder: Path) -> dict[str, Weight]:
    """Every tensor of the model's files, by name.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    found: dict[str, Weight] = {}
    for path in files(folder):
        found.update(header(path))
    return found


def header(path: Path) -> dict[str, Weight]:
    """The tensors of one file, in the order in which they lie in it.

    Raises:
        CheckpointError: the file is missing, is not safetensors, or is not as long as its header says.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise _damaged(path, f"its header would be {length} bytes long, and the file has {size}")
            text = file.read(length)
        whole = json.loads(text.decode("utf-8"))
        found = {name: _weight(path, row, 8 + length) for name, row in whole.items() if name != "__metadata__"}
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(explain("file", str(path), "it is missing", remedy_for(path.parent))) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"its header cannot be read: {error or type(error).__name__}") from None
    end = 8 + length
    for name, weight in sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)):
        if weight.start != end:
            raise _damaged(path, f"the tensor {name} does not begin where the one before it ends")
        end = weight.stop
    if end != size:
        raise _damaged(path, f"it has {size} bytes instead of {end}")
    return dict(sorted(found.items(), key=lambda item: item[1].start))


def write(
    path: Path,
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int], Callable[[], Tensor]]],
    metadata: Mapping[str, str] | None = None,
    told: Callable[[int], None] | None = None,
) -> Digest:
    """Write a safetensors file, one tensor after the other.

    Args:
        tensors: dtype, shape, and a function that gives the tensor when its turn comes.
        metadata: text for the header; the default is what transformers asks for.
        told: called with the bytes of each tensor written.

    Raises:
        CheckpointError: the disk is full or refuses.
    """
    rows: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    at = 0
    # as safetensors itself: the widest first, so that every tensor is aligned
    order = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
    for name in order:
        dtype, shape, _ = tensors[name]
        stop = at + math.prod(shape) * dtype.itemsize
        rows[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with hashed(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            dtype, shape, read = tensors[name]
            data = read().to(dtype).contiguous().reshape(-1)
            assert data.numel() == math.prod(shape)
            if data.numel():
                file.write(data.view(torch.uint8).numpy())
            if told is not None:
                told(data.nbytes)
    return file.digest


def metadata(path: Path) -> dict[str, str]:
    """What a file's header says beside its tensors; the header must have been read before."""
    with path.open("rb") as file:
        whole = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    found = whole.get("__metadata__")
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def _shards(index: Path) -> list[str]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if not names or any(Path(name).name != name or name in (".", "..") for name in names):
            raise ValueError("it names no files, or files outside the folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(index, f"it cannot be read: {error or type(error).__name__}") from None
    return sorted(names)


def _weight(path: Path, row: Mapping[str, Any], base: int) -> Weight:
    start, stop = row["data_offsets"]
    shape, dtype = tuple(row["shape"]), row["dtype"]
    if any(type(n) is not int or n < 0 for n in (start, stop, *shape)) or not isinstance(dtype, str):
        raise ValueError(f"a row {row}")
    if dtype in DTYPES and stop - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{stop - start} bytes for the shape {shape} of {dtype}")
    return Weight(path, dtype, shape, base + start, base + stop)


def _damaged(path: Path, cause: str) -> CheckpointError:
    return CheckpointError(explain("file", str(path), f"it is truncated or damaged: {cause}", remedy_for(path.parent)))

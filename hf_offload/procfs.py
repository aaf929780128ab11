"""Reading /proc, /sys and cgroup folders: numbers, lists and this process's own groups. Stdlib only.

Every function takes `root`, where /proc and /sys are found: tests use made-up trees.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def text(path: Path) -> str:
    """What the file holds; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def number(path: Path) -> int | None:
    """The file's one number; None where it has none: cgroup v2 says "max" for no limit."""
    found = text(path).strip()
    return int(found) if found.isdigit() else None


def fields(path: Path) -> dict[str, int]:
    """First word to second word (an integer) of each line."""
    words = [line.split() for line in text(path).splitlines()]
    return {w[0]: int(w[1]) for w in words if len(w) > 1 and w[1].isdigit()}


def numbers(listed: str) -> frozenset[int]:
    """The numbers of a kernel's list, as "0-3,8,10-11"; what is not a number is left out."""
    found: set[int] = set()
    for part in listed.strip().split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if first.isdigit() and last.isdigit():
            found.update(range(int(first), int(last) + 1))
    return frozenset(found)


def own_cgroup(root: Path, controller: str) -> str:
    """This process's group in the hierarchy of `controller` ("" is v2's); "/" where the kernel does not say.

    Lines of /proc/self/cgroup read `id:controllers:path` (man 7 cgroups).
    """
    for line in text(root / "proc" / "self" / "cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", "", ""][:3]
        if controller in controllers.split(","):
            return path
    return "/"


def around(mount: Path, group: str) -> Iterator[tuple[str, Path]]:
    """The group and each one around it, innermost first, that exist below `mount`.

    In a container the mount is often the container's own group while the kernel names it from the host's root (or with
    "..", from another namespace): such folders do not exist, and the mount itself is what counts.
    """
    inside = PurePosixPath("/", *(part for part in PurePosixPath(group).parts if part not in ("/", "..")))
    for path in (inside, *inside.parents):
        folder = mount / path.relative_to("/")
        if folder.is_dir():
            yield str(path), folder

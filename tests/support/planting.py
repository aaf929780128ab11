"""Bugs that are planted into a copy of the code, one at a time, to see that the test named for each fails.

A list of `Planted` and `main` make a script (`tests/engine/planted.py`, `tests/contracts/planted.py`); `check` and
`Copy.verdict_of` make tests of the same list.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
LAYOUT = {"hf_offload": "hf_offload", "kernels": "hf_offload/kernels", "callbacks": "hf_offload/callbacks",
          "recipes": "hf_offload/recipes", "tests": "tests", "pyproject.toml": "pyproject.toml"}  # fmt: skip
"""Where each folder lies in the copy: as it would be installed, so that one entry of PYTHONPATH finds all of it. An
editable install looks behind PYTHONPATH."""
HUNG_S = 100.0
"""Seconds after which a test that goes on has failed: the bug made it hang. pytest-timeout ends it."""
STUCK_S = 400.0
"""Seconds after which pytest itself is ended, where a test hangs in a way that nothing inside can end."""
TRIES = 3
"""A race is not lost every time: a bug counts as caught if its test fails in one of so many runs."""
BROKEN = ("ImportError", "ModuleNotFoundError", "NameError", "SyntaxError", "IndentationError")
"""What a bug that was planted badly raises. A test that fails with these has shown nothing."""


@dataclass(frozen=True)
class Planted:
    """One bug.

    Attributes:
        name: the wait that is taken out, or the symptom, in words.
        test: below `tests/`; it must fail then.
        file: below `hf_offload/`.
        old: the source text that is replaced, its lines without their indentation; it must occur exactly once.
        new: what replaces it; its lines are indented as the line where `old` begins.
    """

    name: str
    test: str
    file: str
    old: str
    new: str = "pass"

    def plant(self, source: str) -> str:
        """`source` with the bug in it."""
        found = list(re.finditer(r"\n *".join(map(re.escape, self.old.split("\n"))), source))
        assert len(found) == 1, f"{self.name}: its text occurs {len(found)} times in {self.file}"
        start, end = found[0].span()
        line = source[source.rfind("\n", 0, start) + 1 :]
        indent = line[: len(line) - len(line.lstrip(" "))]
        return source[:start] + self.new.replace("\n", f"\n{indent}") + source[end:]


def source_of(file: str) -> Path:
    """Where the repository has what an installation has at `hf_offload/FILE`."""
    for folder, to in LAYOUT.items():
        inside = to.removeprefix("hf_offload/") + "/"
        if to != "hf_offload" and file.startswith(inside):
            return REPOSITORY / folder / file.removeprefix(inside)
    return REPOSITORY / "hf_offload" / file


def listed(script: Path) -> tuple[Planted, ...]:
    """The list of a script like `tests/engine/planted.py`."""
    return tuple(runpy.run_path(str(script))["PLANTED"])


def check(bug: Planted) -> None:
    """Without running anything: the bug can be planted, gives a program, and its test is there."""
    source = source_of(bug.file).read_text(encoding="utf-8")
    changed = bug.plant(source)
    assert changed != source
    compile(changed, bug.file, "exec")
    file, _, name = bug.test.partition("::")
    assert f"def {name.partition('[')[0]}(" in (REPOSITORY / "tests" / file).read_text(encoding="utf-8")


# ---- running a test over a copy


@dataclass(frozen=True)
class Verdict:
    """What became of a bug's test.

    Attributes:
        caught: whether it failed, for a reason that can be the bug's.
        how: "failed", "hung", "crashed"; else what happened instead.
        error: the first line of what it failed with.
    """

    caught: bool
    how: str
    error: str = ""


class Recorder:
    """A pytest plugin that writes down which tests began and which failed, each line as it happens."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def _write(self, *words: str) -> None:
        with self._file.open("a", encoding="utf-8") as out:
            out.write("\t".join(word.replace("\n", " ").replace("\t", " ") for word in words) + "\n")

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._write("began", nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self._write("failed", report.nodeid, report.when, crash.message if crash else str(report.longrepr)[-300:])

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._write("ended", nodeid)


_RUN = """
import sys
sys.path.insert(0, "tests")
import pytest, hf_offload.kernels.cpu as cpu
from support.planting import Recorder
assert cpu.__file__.startswith({root!r}), cpu.__file__
sys.exit(pytest.main(sys.argv[1:], plugins=[Recorder(__import__("pathlib").Path({record!r}))]))
"""


class Copy:
    """A copy of the repository at `root`, with the kernels' own compiled code, which is found by the hash of their
    source."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for source, to in LAYOUT.items():
            copy = shutil.copytree if (REPOSITORY / source).is_dir() else shutil.copy2
            copy(REPOSITORY / source, root / to)

    def verdict_of(self, bug: Planted, tries: int = TRIES) -> Verdict:
        """Plant `bug`, run its test, take the bug out again."""
        file = self.root / "hf_offload" / bug.file
        source = file.read_text(encoding="utf-8")
        file.write_text(bug.plant(source), encoding="utf-8")
        try:
            for _ in range(tries):
                verdict = self._try(bug.test)
                if verdict.caught or verdict.how != "passed":
                    return verdict
            return verdict
        finally:
            file.write_text(source, encoding="utf-8")

    def _try(self, test: str) -> Verdict:
        status, record, output = self.run([test], STUCK_S)
        mine = f"tests/{test}"
        failed = [line for line in record if line[0] == "failed" and _is_of(line[1], mine) and line[2] != "setup"]
        if status != 0 and failed:
            error = failed[0][3]
            if any(error.startswith(f"{kind}:") or error == kind for kind in BROKEN):
                return Verdict(False, "broken: the bug is no program", error)
            return Verdict(True, "failed", error)
        if status == 0:
            return Verdict(False, "passed")
        if status < 0 and record and record[-1][0] != "ended" and _is_of(record[-1][1], mine):
            return Verdict(True, "hung" if status == _HUNG else "crashed", f"status {status}")
        return Verdict(False, f"not run (status {status})", output[-2000:])

    def run(self, tests: Sequence[str], timeout_s: float) -> tuple[int, list[list[str]], str]:
        """Run tests (below `tests/`) over the copy.

        Returns:
            pytest's exit status, negative where it crashed or hung; what Recorder wrote; pytest's output.
        """
        record = self.root / "record.txt"
        record.unlink(missing_ok=True)
        env = {**os.environ, "PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        env = {name: value for name, value in env.items() if not name.startswith("PYTEST_")}
        code = _RUN.format(root=str(self.root), record=str(record))
        options = ["-q", "-x", "-n0", "-m", "", "-p", "no:cacheprovider", "-o", f"timeout={HUNG_S}"]
        call = [sys.executable, "-c", code, *options, *(f"tests/{test}" for test in tests)]
        text = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        try:
            done = subprocess.run(call, cwd=self.root, env=env, timeout=timeout_s, **text)  # type: ignore[call-overload]
            status, output = done.returncode, done.stdout
        except subprocess.TimeoutExpired as error:
            status, output = _HUNG, str(error)
        lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
        return status, [line.split("\t") for line in lines], output


_HUNG = -1000


def _is_of(nodeid: str, test: str) -> bool:
    """Whether `nodeid` is the test, or the test with some of its parameters."""
    return nodeid == test or nodeid.startswith((f"{test}[", f"{test}::"))


# ---- the script


def main(bugs: Sequence[Planted], words: Sequence[str]) -> int:
    """Plant those of `bugs` whose names contain one of the words (no words: all) and tell what was caught.

    Returns:
        1 if a bug was not caught, or the code as it is fails the tests; else 0.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*", help="only bugs with one of these in their names")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    asked = parser.parse_args(list(words))
    chosen = [bug for bug in bugs if not asked.words or any(word in bug.name for word in asked.words)]
    with ExitStack() as stack:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for _ in range(max(1, asked.jobs)):
            copies.put(Copy(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="planted-")))))
        copy = copies.get()
        tests = sorted({bug.test for bug in chosen})
        status, _, output = copy.run(tests, STUCK_S * len(tests))
        copies.put(copy)
        if status != 0:
            print(f"{output}\nthe code as it is does not pass these tests (status {status}): nothing can be told")
            return 1
        with ThreadPoolExecutor(max(1, asked.jobs)) as pool:
            missed = list(pool.map(lambda bug: _tell(bug, copies), chosen)).count(False)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return 1 if missed else 0


def _tell(bug: Planted, copies: SimpleQueue[Copy]) -> bool:
    copy = copies.get()
    try:
        verdict = copy.verdict_of(bug)
    finally:
        copies.put(copy)
    word = "caught" if verdict.caught else "NOT CAUGHT"
    print(f"{word:<11} {bug.name}: {bug.test}\n{'':<11} {verdict.how}: {verdict.error[:160]}", flush=True)
    return verdict.caught

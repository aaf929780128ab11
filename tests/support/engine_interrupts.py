"""Ctrl-C at a chosen moment: deterministic, so that every moment can be tried."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

# Where interrupts fall: our own code, and the standard library's Python code that takes locks for it.
FILES = ("/hf_offload/", "/threading.py", "/contextlib.py", "/queue.py")


class Interrupter:
    """Raises KeyboardInterrupt at the `at`-th moment (from 1) of a call: before a line, or as a function returns."""

    def __init__(self, at: int, files: tuple[str, ...] = FILES) -> None:
        self.at, self.files, self.count = at, files, 0
        self.where: tuple[CodeType, int] | None = None

    def run(self, call: Callable[[], Any]) -> bool:
        """Call `call()`. Returns False once `at` lies behind its end."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        return self.count >= self.at

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._inside if any(part in frame.f_code.co_filename for part in self.files) else None

    def _inside(self, frame: FrameType, event: str, arg: object) -> Any:
        # As a generator is closed, Python swallows what is raised in it.
        if event == "line" or (event == "return" and not frame.f_code.co_flags & inspect.CO_GENERATOR):
            self.count += 1
            if self.count == self.at:
                self.where = (frame.f_code, frame.f_lineno)
                raise KeyboardInterrupt
        return self._inside

"""A process that ends in the middle of a step, in whatever way: with its own exit code, without a hang or a crash."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from support.faults import ended, start

SETTINGS: dict[str, dict[str, Any]] = {
    "in_order": {"schedule": "in_order"},
    "overlapped": {},
    "streamed": {"stream_gradients": True},
    "speculative": {"stream_gradients": True, "shadow_bytes": 1 << 20},
    "delayed": {"schedule": "delayed", "delay_warmup_steps": 1},
}
QUICK, SLOW = ("overlapped", "speculative"), ("in_order", "streamed", "delayed")
WAYS: dict[str, tuple[str, int]] = {
    "the end of the script": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "sys.exit in a hook": ("model[1].register_forward_hook(lambda *a: sys.exit(4))\nstep(optimizer)", 4),
    "os._exit": ("os._exit(5)", 5),
    "an error nobody caught": ("raise ValueError('mine')", 1),
    "an error in backward": ("model[1].weight.register_hook(lambda g: 1 / 0)\nstep(optimizer)", 1),
    "sys.exit in another thread": ("t = threading.Thread(target=sys.exit)\nt.start()\nt.join()", 0),
    "an exit function that trains": ("atexit.register(step, optimizer)", 0),
    "an exit function that closes": ("atexit.register(optimizer.close)", 0),
    "a module's last reference": ("import types\nm = types.ModuleType('m')\nm.o = optimizer\nsys.modules['m'] = m", 0),
    "a cycle": ("optimizer.me = optimizer", 0),
}  # fmt: skip


EACH = """
import gc, json

def child(number, settings, code):
    with open(f"{number}.err", "w") as err:
        os.dup2(err.fileno(), 2)
    optimizer = make(**settings)
    step(optimizer, 2)
    exec(code, {**globals(), "optimizer": optimizer})

def seen(pid, until):
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hung"

step(warm := make(schedule="in_order", link_latency_us=0))  # loads the kernels, for all children
warm.close()
gc.freeze()  # what a child ends with need not be looked through once more
codes = []
for number, (settings, code) in enumerate(json.loads(sys.argv[1])):
    pid = os.fork()
    if pid == 0:
        break
    codes.append(seen(pid, time.monotonic() + 60))
if pid == 0:
    child(number, settings, code)  # and the interpreter ends as ever
else:
    print(json.dumps(codes))
"""


@pytest.mark.parametrize("modes", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_it_ends_with_its_own_exit_code(modes: tuple[str, ...], tmp_path: Path) -> None:
    """Each way in each mode; forked off before anything of ours has begun, since importing torch takes seconds."""
    cases = [(way, mode) for way in WAYS for mode in modes]
    tasks = [(SETTINGS[mode], WAYS[way][0]) for way, mode in cases]
    code, out, err = ended(start(EACH, tmp_path, json.dumps(tasks)), 110)
    assert code == 0, err
    for number, (case, found) in enumerate(zip(cases, json.loads(out))):
        check(case, found, (tmp_path / f"{number}.err").read_text(), WAYS[case[0]][1])


def check(case: object, code: int, err: str, expected: int) -> None:
    assert code == expected, f"{case}: {code} {err}"
    for word in ("Fatal", "Segmentation", "Exception ignored", "terminate called"):
        assert word not in err, f"{case}: {err}"


CTRL_C = "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
HANDLED = """
def leave(number, frame):
    raise SystemExit(7)

signal.signal(signal.SIGTERM, leave)
"""
FOREVER = "optimizer = make()\nstep(optimizer)\nprint('in mid-step', flush=True)\nstep(optimizer, 100_000)\n"


def test_a_signal_that_ends_it(tmp_path: Path) -> None:
    """SIGTERM as a scheduler sends it, handled or not; Ctrl-C that nobody handles."""
    sent = {
        "terminated": (signal.SIGTERM, -signal.SIGTERM, FOREVER),
        "terminated, handled": (signal.SIGTERM, 7, HANDLED + FOREVER),
        "interrupted": (signal.SIGINT, -signal.SIGINT, CTRL_C + FOREVER),
    }  # fmt: skip
    programs = {name: start(code, tmp_path) for name, (_, _, code) in sent.items()}
    for name, program in programs.items():
        assert program.stdout is not None and "in mid-step" in program.stdout.readline()
        program.send_signal(sent[name][0])
    for name, program in programs.items():
        code, _, err = ended(program)
        check(name, code, err, sent[name][1])


STUCK = """
optimizer = make(timeout_s=1.0, link_latency_us=1e9)
threading.Timer(0.1, lambda: None).start()
for p in model.parameters():
    p.grad = torch.ones_like(p)
try:
    optimizer.step()
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_copy_that_never_ends_does_not_keep_it(tmp_path: Path) -> None:
    """It is told of, and waited for no longer than timeout_s."""
    code, out, err = ended(start(STUCK, tmp_path))
    check("stuck", code, err, 0)
    assert "timeout_s=1.0" in out and "did not end in 1.0 s" in err

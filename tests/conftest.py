from __future__ import annotations

import signal

# A shell gives programs it starts in the background an ignored SIGINT, and Python leaves that as it is. Tests press
# Ctrl-C, here and in programs they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

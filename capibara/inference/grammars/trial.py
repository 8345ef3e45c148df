"""Compiles a grammar in a process of its own first, where it may take longer than its limits say."""

from __future__ import annotations

import re
import subprocess
import sys

from capibara.core.types import UserError

# llguidance 1.9.1 counts no fuel where it looks whether an intersection or a complement is empty: 5 expressions of 20 letters
# take minutes and gigabytes.
_RISKY = re.compile("[&~]")
_CPU_S = 0.5
_TRY = f"""
import signal, sys
import llguidance
signal.setitimer(signal.ITIMER_PROF, {_CPU_S})
llguidance.LLMatcher(llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_lark(sys.stdin.read()), log_level=0)
"""


def check(lark: str) -> None:
    """Checks that a grammar in Lark's notation compiles in half a second of CPU time.

    Raises:
      UserError: it takes longer.
    """
    if not _RISKY.search(lark):
        return
    done = subprocess.run(
        [sys.executable, "-c", _TRY],
        input=lark.encode("utf-8", "replace"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode < 0:
        raise UserError(
            f"Grammar.lark has & or ~ of expressions that take more than {_CPU_S} s to compile: write shorter ones"
        )

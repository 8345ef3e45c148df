"""Runs a verb as on a host of a TPU slice: `python fake_tpu_vm.py VERB ...`, with chips on a PCI bus in $FAKE_PCI.

What JAX looks for at its import is a file system, so that is what is faked: the chips' numbers. It computes on CPUs.
"""

import glob
import os
import runpy
import sys

_BUS = "/sys/bus/pci/devices"
_glob = glob.glob


def _faked(pattern, *args, **kwargs):
    return _glob(str(pattern).replace(_BUS, os.environ.get("FAKE_PCI", _BUS)), *args, **kwargs)


glob.glob = _faked

if __name__ == "__main__":
    verb = sys.argv.pop(1)
    runpy.run_module(f"capibara.{verb}", run_name="__main__", alter_sys=True)

"""A private root file system for a program: Python and the system's libraries, read-only, and empty writable folders.

Needs Linux 5.12 and permission to mount (root, or a user namespace). `jail` loads this file; it imports only the standard
library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Callable, Iterator, Sequence

_Mount = Callable[[str | None, str, str | None, int, str | None], None]
_NOSUID, _NODEV, _BIND, _REC, _PRIVATE = 2, 4, 4096, 16384, 1 << 18  # of mount.h
_DETACH = 2
_SETATTR, _AT_RECURSIVE = 442, 0x8000  # mount_setattr: the same number on all architectures
_READ_ONLY = 1 | 2 | 4  # read-only, and no set-user-id programs or devices
_FILES = 20_000  # largest number of files in a writable folder
_DEVICES = ("null", "zero", "full", "random", "urandom")
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr")
_SETTINGS = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "mime.types", "nsswitch.conf")
_SHARED_MEMORY = ("/proc/sys/kernel/shmall", "/proc/sys/kernel/shmmax")
WORK = "/tmp/program"


def system_paths() -> list[str]:
    """The existing system paths that a program needs beside Python."""
    result = [f"/{name}" for name in _SYSTEM] + [f"/etc/{name}" for name in _SETTINGS]
    return [path for path in result if os.path.lexists(path)]


def enter(libc: ctypes.CDLL, at: str, shown: Sequence[str], disk_bytes: int) -> None:
    """Makes a new root at an empty folder and moves this process there; its mount namespace must be its own.

    Args:
      libc: the C library from ctypes, with use_errno.
      at: the empty folder.
      shown: files and folders that are visible there, read-only, at their own paths.
      disk_bytes: size of each writable folder.

    Raises:
      OSError: this machine does not permit it; the process keeps its root.
    """
    mount = _mounter(libc)
    mount(None, "/", None, _REC | _PRIVATE, None)
    mount("tmpfs", at, "tmpfs", _NOSUID | _NODEV, "size=4m,mode=755")
    for folder, mode in (("proc", "555"), ("tmp", "1777"), ("dev", "755"), ("dev/shm", "1777"), ("var/tmp", "1777")):
        os.makedirs(f"{at}/{folder}", exist_ok=True)
        if folder in ("tmp", "dev/shm", "var/tmp"):
            options = f"size={disk_bytes},nr_inodes={_FILES},mode={mode}"
            mount("tmpfs", f"{at}/{folder}", "tmpfs", _NOSUID | _NODEV, options)
    for path in shown:
        _show(libc, mount, path, at)
    for name in _DEVICES:
        _bind(mount, f"/dev/{name}", f"{at}/dev/{name}")
    for name, target in {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1",
                         "stderr": "/proc/self/fd/2"}.items():  # fmt: skip
        os.symlink(target, f"{at}/dev/{name}")
    with contextlib.suppress(OSError):  # not permitted in a container that hides parts of /proc
        mount("proc", f"{at}/proc", "proc", _NOSUID | _NODEV, None)
    with _moved(libc, at):
        _read_only(libc, "/", 0)
    for path in _SHARED_MEMORY:  # no limit covers System V shared memory
        with contextlib.suppress(OSError), open(path, "w", encoding="ascii") as file:
            file.write(str(disk_bytes // (4096 if path.endswith("all") else 1)))


@contextlib.contextmanager
def _moved(libc: ctypes.CDLL, at: str) -> Iterator[None]:
    """A context that makes the folder this process's root, and unmounts the old root at the end."""
    os.chdir(at)
    if libc.pivot_root(b".", b".") != 0:  # stacks the old root on the new one, see pivot_root(2)
        raise OSError(ctypes.get_errno(), "pivot_root")
    if libc.umount2(b".", _DETACH) != 0:
        raise OSError(ctypes.get_errno(), "umount2")
    os.chdir("/")
    yield


def _mounter(libc: ctypes.CDLL) -> _Mount:
    def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None) -> None:
        words = [None if word is None else word.encode() for word in (source, target, kind, options)]
        if libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]) != 0:
            raise OSError(ctypes.get_errno(), f"mount {target}")

    return mount


def _show(libc: ctypes.CDLL, mount: _Mount, path: str, at: str) -> None:
    if os.path.islink(path):
        os.makedirs(os.path.dirname(at + path), exist_ok=True)
        os.symlink(os.readlink(path), at + path)
        return
    _bind(mount, path, at + path)
    _read_only(libc, at + path, _AT_RECURSIVE)


def _bind(mount: _Mount, path: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if stat.S_ISDIR(os.stat(path).st_mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    mount(path, target, None, _BIND | _REC, None)


def _read_only(libc: ctypes.CDLL, path: str, flags: int) -> None:
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0)
    if libc.syscall(_SETATTR, -100, path.encode(), flags, ctypes.byref(attributes), ctypes.c_size_t(32)) != 0:
        raise OSError(ctypes.get_errno(), f"mount_setattr {path}")

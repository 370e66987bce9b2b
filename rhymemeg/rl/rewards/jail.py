"""The program that runs a piece of untrusted Python, cut off from the machine; see `rhymemeg.rl.rewards.sandbox`.

    python -I -S jail.py '{"folder": ..., "program": ..., "limits": {...}, "readable": [...]}'

It needs the standard library only and is started in a new interpreter. Before it hands over to the program, which stays
bound by all of it, it

1. leaves its network, process, IPC and mount namespaces for new, empty ones (in a new user namespace, so no privilege is
   needed), and puts a memory file system of limited size on the program's folder;
2. limits processor time, address space, file size, open files and processes (setrlimit);
3. gives up gaining privileges (no_new_privs) and, by Landlock, all access to files but reading those of the interpreter and
   the libraries, and writing in the program's folder.

What 1 cannot have ends it with status 97 and the reason on standard error: nothing runs that is not cut off. Landlock is
taken where the kernel has it. The program is process 1 of its namespace: when it ends, everything that it started ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from typing import Any, NoReturn

REFUSED = 97
_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 2, 4, 1 << 14, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_LANDLOCK = (444, 445, 446)  # create_ruleset, add_rule, restrict_self: the same on all architectures
# Rights of Landlock's first version: execute 1, write 2, read a file 4, read a directory 8, and above changes of
# directories. Later versions add REFER (1 << 13) and TRUNCATE (1 << 14).
_ALL_RIGHTS, _READ_RIGHTS = (1 << 13) - 1, 1 | 4 | 8

libc = ctypes.CDLL(None, use_errno=True)


def refuse(what: str) -> NoReturn:
    number = ctypes.get_errno()
    print(f"{what}: {os.strerror(number)}" if number else what, file=sys.stderr, flush=True)
    os._exit(REFUSED)


def leave_namespaces(folder: str, megabytes: int) -> None:
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(_NEWUSER | _NEWNET | _NEWPID | _NEWIPC | _NEWNS):
        refuse("the kernel gives this process no namespaces of its own (unshare)")
    for file, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{file}", "w") as out:
            out.write(text)
    if libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None):
        refuse("mount / private")
    options = f"size={megabytes}m,nr_inodes=1000,mode=700".encode()
    if libc.mount(b"tmpfs", folder.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options):
        refuse("mount tmpfs")


def set_limits(limits: dict[str, int]) -> None:
    for name, value in (
        ("RLIMIT_CPU", limits["cpu_seconds"]),
        ("RLIMIT_AS", limits["memory_mib"] << 20),
        ("RLIMIT_FSIZE", limits["disk_mib"] << 20),
        ("RLIMIT_NOFILE", limits["open_files"]),
        ("RLIMIT_NPROC", limits["processes"]),
        ("RLIMIT_CORE", 0),
    ):
        resource.setrlimit(getattr(resource, name), (value, value))


def confine_files(folder: str, readable: list[str]) -> None:
    """Landlock. Nothing happens on a kernel without it."""
    create, add, restrict = _LANDLOCK
    version = libc.syscall(create, None, 0, 1)
    if version < 1:
        return
    extra = (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)
    rights = struct.pack("<Q", _ALL_RIGHTS | extra)
    ruleset = libc.syscall(create, rights, len(rights), 0)
    if ruleset < 0:
        refuse("landlock_create_ruleset")
    for path, allowed in [(folder, _ALL_RIGHTS | extra), *((p, _READ_RIGHTS) for p in readable)]:
        if not os.path.exists(path):
            continue
        fd = os.open(path, os.O_PATH)
        if not os.path.isdir(path):
            allowed &= 1 | 2 | 4
        if libc.syscall(add, ruleset, 1, struct.pack("<Qi", allowed, fd), 0):
            refuse(f"landlock_add_rule {path}")
        os.close(fd)
    if libc.syscall(restrict, ruleset, 0):
        refuse("landlock_restrict_self")


def main() -> None:
    setup: dict[str, Any] = json.loads(sys.argv[1])
    folder, limits = setup["folder"], setup["limits"]
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == 1:
        os._exit(REFUSED)  # whoever started it has gone already
    leave_namespaces(folder, limits["disk_mib"])
    child = os.fork()  # the first process of the new namespace
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.chdir(folder)
    with open("main.py", "w", encoding="utf-8") as out:
        out.write(setup["program"])
    set_limits(limits)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    confine_files(folder, setup["readable"])
    environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    os.execve(sys.executable, [sys.executable, "-I", "main.py"], environment)


if __name__ == "__main__":
    main()

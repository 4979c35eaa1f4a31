"""The walls of the sandbox, put up by the process that runs in it before it reads what it runs.

`enter_namespaces` leaves the machine: an empty read-only root with the interpreter and its libraries, process,
network and IPC tables of its own, an id without rights. `confine` limits the process itself: time, memory, files, and
system calls that a calculation never makes. code_sandbox sends this code into the sandbox, so it imports only the
standard library. It needs Linux on x86-64 or 64-bit ARM.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct

NOBODY = 65534
LIBC = ctypes.CDLL(None, use_errno=True)
NEW_USER, SPACES = 0x10000000, 0x00020000 | 0x20000000 | 0x08000000 | 0x40000000 | 0x04000000 | 0x02000000
"""CLONE_NEWUSER; mount, process, IPC, network, host name and control group namespaces."""
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 2, 4, 4096, 16384, 1 << 18, 2
AT_FDCWD, AT_RECURSIVE, READ_ONLY = -100, 0x8000, 0x1 | 0x2 | 0x4
"""READ_ONLY: MOUNT_ATTR_RDONLY, NOSUID and NODEV."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 4, 22, 38, 2
BASE, OLD = "/tmp", "/old"
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""AUDIT_ARCH and the column of SYSTEM_CALLS."""
SYSTEM_CALLS = {
    # other processes
    "fork": (57, None),
    "vfork": (58, None),
    "clone": (56, 220),
    "clone3": (435, 435),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "prlimit64": (302, 261),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "mount_setattr": (442, 442),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # sockets (those of virtual machines know no network namespace), keyrings, memory beyond RLIMIT_AS
    "socket": (41, 198),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # the kernel itself
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "personality": (135, 92),
    "seccomp": (317, 277),
    "syslog": (103, 116),
    "fanotify_init": (300, 262),
    "inotify_init1": (294, 26),
}
"""System calls that are refused with EPERM, with their numbers on each machine; fork and vfork do not exist on ARM."""
THREAD_CALLS = ("clone", "clone3")
"""Of these, what starts a thread. They also start processes, which end with the sandbox."""


def enter_namespaces(visible: list[str], links: list[tuple[str, str]], hidden: list[str]) -> None:
    """Return in a process that sees `visible` (files and directories, read-only), links to them, and nothing in
    `hidden`.

    The calling process waits for it and leaves with its exit code. Raises OSError where the kernel does not allow a
    namespace.
    """
    user, group = os.geteuid(), os.getegid()
    if user != 0 or not _is_mapped(NOBODY) or LIBC.unshare(SPACES) != 0:
        _call("unshare", SPACES | NEW_USER)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{NOBODY} {user} 1"),
            ("gid_map", f"{NOBODY} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    _mount_empty(BASE)
    os.mkdir(BASE + OLD)
    _system_call("pivot_root", BASE.encode(), (BASE + OLD).encode())
    os.chdir("/")
    for path in visible:
        _show(path)
    for path, target in links:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)
    for path in hidden:
        _mount_empty(path)
        _set_read_only(path)
    _call("umount2", OLD.encode(), MNT_DETACH)
    os.rmdir(OLD)
    _set_read_only("/")
    _drop_rights()
    for _ in range(2):  # the first process of a namespace gets no signal from the others, so it only waits
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def hide_memory() -> None:
    """Protect the process from others of the same user: they cannot trace it or read it through /proc, also after a
    fork."""
    _call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)


def confine(seconds: int, memory_bytes: int, num_threads: int = 0) -> None:
    """Limit this process for good; `num_threads` beside its own may be started."""
    for name, limit in (
        ("CPU", seconds),
        ("AS", memory_bytes),
        ("FSIZE", 0),
        ("NOFILE", 16),
        ("CORE", 0),
        ("NPROC", num_threads),
    ):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    program = _filter(THREAD_CALLS if num_threads else ())
    buffer = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    _call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, described, 0, 0)


def _filter(allowed: tuple[str, ...]) -> bytes:
    """A BPF program over struct seccomp_data: another architecture kills, SYSTEM_CALLS but the allowed get EPERM."""
    architecture, column = MACHINES[os.uname().machine]
    numbers = [pair[column] for name, pair in SYSTEM_CALLS.items() if pair[column] is not None and name not in allowed]
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    kill, refuse, allow = 0x80000000, 0x00050000 | 1, 0x7FFF0000
    steps = [(load, 0, 0, 4), (equal, 1, 0, architecture), (answer, 0, 0, kill), (load, 0, 0, 0)]
    steps.append((at_least, len(numbers) + 1, 0, 0x40000000))  # x32 has the same calls under other numbers
    steps += [(equal, len(numbers) - index, 0, number) for index, number in enumerate(numbers)]
    steps += [(answer, 0, 0, allow), (answer, 0, 0, refuse)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def _is_mapped(user: int) -> bool:
    """Whether the id exists here: in a container without root's rights often only root does."""
    with open("/proc/self/uid_map") as file:
        return any(int(first) <= user < int(first) + int(count) for first, _, count in map(str.split, file))


def _show(path: str) -> None:
    if os.path.isdir(OLD + path):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "w").close()
    _call("mount", (OLD + path).encode(), path.encode(), None, MS_BIND | MS_REC, None)
    _set_read_only(path)


def _mount_empty(path: str) -> None:
    _call("mount", b"tmpfs", path.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, b"size=1m,mode=755")


def _set_read_only(path: str) -> None:
    attributes = struct.pack("QQQQ", READ_ONLY, 0, 0, 0)
    _system_call("mount_setattr", AT_FDCWD, path.encode(), AT_RECURSIVE, attributes, len(attributes))


def _drop_rights() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    _call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    hide_memory()
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _system_call(name: str, *arguments: object) -> None:
    number = SYSTEM_CALLS[name][MACHINES[os.uname().machine][1]]
    _call("syscall", ctypes.c_long(number), *arguments)


def _call(name: str, *arguments: object) -> None:
    if getattr(LIBC, name)(*arguments) == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")

"""Leases: of all machines that share a store, one computes a key at a time.

A lease is one object, `leases/<key>`. Its holder writes it anew every third of its duration; every write names the
version that it replaces, so of two writers one wins. Clocks of two machines are never compared: whoever waits watches,
by its own clock, whether the object changes during one whole duration, and then takes the lease over with the next
fencing number. A holder that was paused meanwhile learns it from its next write, at the latest before its commit.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from threading import Event, Lock, Thread

from pydantic import BaseModel, ConfigDict, ValidationError

from infra.storage.object_store import ObjectStore

LEASE_SECONDS = 60.0
"""How long a lease holds after its last renewal: what another machine waits for after the holder's power cut."""
RENEWALS_PER_LEASE = 3
POLLS_PER_LEASE = 20
MAX_POLL_SECONDS = 1.0
COMPUTES = "computes this"
"""What the holder of a step's lease does, in a message for those who wait."""
_held_here: set[str] = set()
"""Owners that this process is: what it could not release, because the store did not answer, it does not wait for."""


class LeaseLostError(RuntimeError):
    """Another run has taken this work over: this one must not commit it."""


class LeaseRecord(BaseModel):
    """What a lease object says."""

    model_config = ConfigDict(frozen=True)

    fence: int
    """Fencing number: one higher for each holder of the key. Manifests carry it."""
    owner: str
    """Identifier of this holding."""
    host: str
    pid: int
    process_start: int
    """Clock ticks from the boot of the host to the start of the process: a number of a process is used again."""
    kernel: str
    """Boot of the host and namespace of process numbers: `pid` has a meaning only there."""
    home: str
    since: str
    """Time of the take-over by the holder's clock: for people, never compared."""
    expires: str
    """The same for the end of the lease."""
    duration_seconds: float
    num_renewals: int = 0
    is_released: bool = False

    @property
    def holder(self) -> str:
        """Who holds it, in words."""
        return f"host {self.host}, process {self.pid}, since {self.since}"

    def is_abandoned(self) -> bool:
        """Whether the holder was a process of this machine and has ended, or given up. False where this cannot be
        known."""
        if self.kernel != _kernel():
            return False
        return self.owner not in _held_here if self.pid == os.getpid() else _has_ended(self.pid, self.process_start)


def lease_name(key: str) -> str:
    """Name of a key's lease in the store."""
    return f"leases/{key}"


def read_lease(objects: ObjectStore, key: str) -> LeaseRecord | None:
    """None where there is none, or none that can be read."""
    found = objects.read_version(lease_name(key))
    return None if found is None else parse_lease(found[0])


def parse_lease(data: bytes) -> LeaseRecord | None:
    """None where a write was cut short or another version of the program wrote it: nobody can say who holds it."""
    try:
        return LeaseRecord.model_validate_json(data)
    except ValidationError:
        return None


class Lease:
    """A lease that this process holds, renewed by a thread of its own until it is released."""

    def __init__(self, objects: ObjectStore, key: str, record: LeaseRecord, version: str, written: float) -> None:
        self.key = key
        self._objects = objects
        self._record = record
        self._version = version
        self._written = written
        self._is_lost = False
        self._writing = Lock()
        self._released = Event()
        self._thread = Thread(target=self._renew_until_released, name=f"lease-{key[:12]}", daemon=True)
        _held_here.add(record.owner)
        self._thread.start()

    @property
    def fence(self) -> int:
        return self._record.fence

    def confirm(self) -> None:
        """Renew the lease now. Raises LeaseLostError where another run has taken it over."""
        with self._writing:
            self._write(self._renewed())

    def check(self) -> None:
        """The same where the lease was not renewed for its whole duration; else costs nothing."""
        if self._is_lost or _seconds_since_boot() - self._written > self._record.duration_seconds:
            self.confirm()

    def release(self) -> None:
        """Let others have it. Where the store does not answer, the lease ends by itself."""
        self._released.set()
        self._thread.join()
        _held_here.discard(self._record.owner)

    def remove(self) -> bool:
        """Release the lease and remove its object; False where somebody else has taken it since."""
        self.release()
        return self._objects.delete_version(lease_name(self.key), self._version)

    def _renew_until_released(self) -> None:
        while not self._released.wait(self._record.duration_seconds / RENEWALS_PER_LEASE):
            self._try_to_write(self._renewed)
            if self._is_lost:
                return
        self._try_to_write(lambda: self._record.model_copy(update={"is_released": True}))

    def _try_to_write(self, record: Callable[[], LeaseRecord]) -> None:
        """What fails here is raised by `check` and `confirm`, in the thread that computes."""
        with self._writing:
            try:
                self._write(record())
            except Exception:
                return

    def _renewed(self) -> LeaseRecord:
        return self._record.model_copy(
            update={"num_renewals": self._record.num_renewals + 1, "expires": _after(self._record.duration_seconds)}
        )

    def _write(self, record: LeaseRecord) -> None:
        started = _seconds_since_boot()
        version = None if self._is_lost else write_lease(self._objects, self.key, record, self._version)
        if version is None:
            self._is_lost = True
            other = read_lease(self._objects, self.key)
            who = "another run" if other is None else f"another run ({other.holder})"
            raise LeaseLostError(
                f"{self._objects.uri}: {who} has taken over the work on key {self.key[:12]}, because this run was "
                f"paused or cut off from the store for longer than {self._record.duration_seconds:g} s. This run "
                f"commits nothing of it: run again to use the other's result"
            )
        self._record, self._version, self._written = record, version, started


def acquire_lease(
    objects: ObjectStore, key: str, home: Path, say: Callable[[str], None], work: str = COMPUTES
) -> Lease:
    """Take the lease of a key as soon as nobody holds it; `say` gets who does. `work` says what its holder does."""
    watched, since, said = None, 0.0, ""
    while True:
        found = objects.read_version(lease_name(key))
        record, version = (None, None) if found is None else (parse_lease(found[0]), found[1])
        if version != watched:
            watched, since = version, time.monotonic()
        duration = LEASE_SECONDS if record is None else record.duration_seconds
        is_silent = version is not None and time.monotonic() - since >= duration
        is_held = version is not None and (record is None or not is_free(record))
        holder = f" ({'its lease cannot be read' if record is None else record.holder})"
        lease = None if is_held and not is_silent else take_lease(objects, key, home, record, version)
        if is_silent and lease is not None:
            say(f"the run that {work}{holder} no longer renews its lease: its work is taken over")
        if lease is not None:
            return lease
        if is_held and holder != said:
            said = holder
            say(f"another run {work}{holder}; waiting for its result")
        time.sleep(min(MAX_POLL_SECONDS, duration / POLLS_PER_LEASE))


def is_free(record: LeaseRecord) -> bool:
    """Whether nobody holds a lease, without having watched it."""
    return record.is_released or record.is_abandoned()


def take_lease(
    objects: ObjectStore, key: str, home: Path, record: LeaseRecord | None, version: str | None
) -> Lease | None:
    """Take over the lease that was read as this version; None where somebody else was faster."""
    started = _seconds_since_boot()
    taken = LeaseRecord(
        fence=1 if record is None else record.fence + 1,
        owner=uuid.uuid4().hex,
        host=socket.gethostname(),
        pid=os.getpid(),
        process_start=_process_state(os.getpid())[1],
        kernel=_kernel(),
        home=str(home),
        since=_after(0),
        expires=_after(LEASE_SECONDS),
        duration_seconds=LEASE_SECONDS,
    )
    written = write_lease(objects, key, taken, version)
    return None if written is None else Lease(objects, key, taken, written, started)


def write_lease(objects: ObjectStore, key: str, record: LeaseRecord, version: str | None) -> str | None:
    """The new version; None where somebody else has the lease. A write whose answer was lost has changed the version:
    what its owner finds there as its own, it replaces."""
    data = record.model_dump_json(indent=1).encode()
    written = objects.replace_version(lease_name(key), data, version)
    if written is not None:
        return written
    found = objects.read_version(lease_name(key))
    there = None if found is None else parse_lease(found[0])
    if found is None or there is None or there.owner != record.owner:
        return None
    return found[1] if found[0] == data else objects.replace_version(lease_name(key), data, found[1])


def holder_of(objects: ObjectStore, key: str) -> str:
    """Who holds a lease, in parentheses after a blank; empty where the lease does not say."""
    record = read_lease(objects, key)
    return "" if record is None or record.is_released else f" ({record.holder})"


def _after(seconds: float) -> str:
    return f"{datetime.now(UTC) + timedelta(seconds=seconds):%Y-%m-%d %H:%M:%S} UTC"


def _seconds_since_boot() -> float:
    """A clock that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@cache
def _kernel() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _has_ended(pid: int, start: int) -> bool:
    """Whether a process of this machine is no more. One that this user may not look at counts as alive."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    try:
        state, ticks = _process_state(pid)
    except FileNotFoundError:
        return True
    return state in "ZX" or ticks != start


def _process_state(pid: int) -> tuple[str, int]:
    """State of a process and clock ticks from boot to its start."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])

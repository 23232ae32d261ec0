"""Record what processes do to the files of a folder, call by call: names, contents, syncs.

A recorded process is traced, with a seccomp filter that reports the system calls that change files. Calls proceed one
at a time, and the recorder scans the folder after each: the difference is what the call changed, so no arguments are
read except file descriptors. Native code and mapped memory are covered too: a mapped file is read when it is synced.
Needs Linux 5.3 on x86-64 and no installation.

    python file_recorder.py <folder> <socket> <recording>

A process to be recorded calls `record_me` before it starts threads. When its standard input ends, the recorder writes
the recording and ends.
"""

import ctypes
import os
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec

VARIABLE = "FILE_RECORDER_SOCKET"

_DATA = {"write": 1, "pwrite64": 18, "writev": 20, "pwritev": 296, "pwritev2": 328, "ftruncate": 77, "fallocate": 285}
_SYNC = {"fsync": 74, "fdatasync": 75}
_OUT = {"sendfile": 40}
_NAMES = {
    "creat": 85,
    "truncate": 76,
    "rename": 82,
    "renameat": 264,
    "renameat2": 316,
    "unlink": 87,
    "unlinkat": 263,
    "rmdir": 84,
    "mkdir": 83,
    "mkdirat": 258,
    "link": 86,
    "linkat": 265,
    "symlink": 88,
    "symlinkat": 266,
}
_OPEN = {"open": (2, 24), "openat": (257, 32)}
"""Call number, and offset of the flags in seccomp's data."""
_COPY = {"copy_file_range": 326}
_CALLS = {number: name for calls in (_DATA, _SYNC, _OUT, _NAMES, _COPY) for name, number in calls.items()}
_CALLS |= {number: name for name, (number, _) in _OPEN.items()}
_CREATING = os.O_CREAT | os.O_TRUNC | 0o20000000  # and O_TMPFILE

_SEIZE, _CONT, _SYSCALL, _CALL_INFO = 0x4206, 7, 24, 0x420E
_OPTIONS = 0x1 | 0x2 | 0x4 | 0x8 | 0x10 | 0x80  # SYSGOOD, FORK, VFORK, CLONE, EXEC, SECCOMP
_SECCOMP_EVENT, _STOP_EVENT = 7, 128
_WALL = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


class Change(msgspec.Struct, frozen=True, array_like=True):
    """A change of one name in one folder. Numbers identify files and folders; 0 means none."""

    folder: int
    name: str
    before: int
    after: int


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One system call that changed or synced something."""

    name: str
    start: int
    """time.monotonic_ns before it proceeded."""
    end: int
    changes: list[Change]
    """Names that appear or disappear together."""
    contents: dict[int, bytes]
    """The whole new content of files, by number."""
    folders: list[int]
    """Numbers of new folders."""
    synced: int
    """Number of the file or folder that was synced; 0 means none."""


class Recording(msgspec.Struct, frozen=True):
    """Calls in the order in which they happened. Number 1 is the folder itself, which was empty."""

    calls: list[Call]


def record_me() -> None:
    """Have this process and its children recorded, if the environment names a recorder."""
    if VARIABLE not in os.environ:
        return
    _libc.prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # PR_SET_PTRACER: any, where Yama restricts it
    _filter_calls()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(os.environ[VARIABLE])
        connection.send(str(os.getpid()).encode())
        assert connection.recv(1) == b"1"


def _filter_calls() -> None:
    """Report the calls that change files to the tracer."""
    load, jump_equal, jump_set, give = 0x20, 0x15, 0x45, 0x06
    trace, allow = 0x7FF00000, 0x7FFF0000
    program = [(load, 0, 0, 0)]
    for number, flags_at in _OPEN.values():
        program += [(jump_equal, 0, 4, number), (load, 0, 0, flags_at), (jump_set, 0, 1, _CREATING)]
        program += [(give, 0, 0, trace), (give, 0, 0, allow)]
    for number in sorted(_CALLS.keys() - {number for number, _ in _OPEN.values()}):
        program += [(jump_equal, 0, 1, number), (give, 0, 0, trace)]
    program.append((give, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
    assert _libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert _libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(header)), 0, 0) == 0, "seccomp filters are not allowed"


class _Folder:
    """The folder as last seen, with the numbers of its files and folders. Numbers are never reused."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.numbers = {self.root.stat().st_ino: 1}
        self.entries: dict[tuple[int, str], int] = {}
        self.contents: dict[int, bytes] = {}
        self._next = 2

    def look(self) -> tuple[list[Change], list[int], list[tuple[int, Path]]]:
        """Return the names changed since the last look, the numbers of new folders, and new files with their paths."""
        found: dict[tuple[int, str], int] = {}
        numbers = {self.root.stat().st_ino: 1}
        folders: list[int] = []
        files: list[tuple[int, Path]] = []
        self._walk(str(self.root), 1, found, numbers, folders, files)
        keys = sorted({*found, *self.entries}, key=str)
        pairs = [(key, self.entries.get(key, 0), found.get(key, 0)) for key in keys]
        changes = [Change(*key, before, after) for key, before, after in pairs if before != after]
        self.entries, self.numbers = found, numbers
        return changes, folders, files

    def _walk(self, path, number, found, numbers, folders, files):
        for entry in os.scandir(path):
            inode = entry.inode()
            child = numbers.get(inode) or self.numbers.get(inode)
            if child is None:
                child, self._next = self._next, self._next + 1
                if entry.is_dir(follow_symlinks=False):
                    folders.append(child)
                else:
                    files.append((child, Path(entry.path)))
            numbers[inode] = child
            found[number, entry.name] = child
            if entry.is_dir(follow_symlinks=False):
                self._walk(entry.path, child, found, numbers, folders, files)

    def read(self, number: int, path: Path) -> dict[int, bytes]:
        """Return the content of a file by its number, if it has changed."""
        content = path.read_bytes()
        if self.contents.get(number) == content:
            return {}
        self.contents[number] = content
        return {number: content}

    def number_of(self, process: int, descriptor: int) -> int:
        """Return the number of the file behind a process's descriptor, 0 if it has no name in the folder."""
        path = Path(f"/proc/{process}/fd/{descriptor}")
        try:
            inside = path.readlink().is_relative_to(self.root)
            return self.numbers.get(path.stat().st_ino, 0) if inside else 0
        except FileNotFoundError:
            return 0


class _Tracer:
    def __init__(self, folder: _Folder, listener: socket.socket) -> None:
        self.folder = folder
        self.listener = listener
        self.calls: list[Call] = []
        self._waiting: list[tuple[int, int, list[int]]] = []
        self._under_way: tuple[int, int, int, int] | None = None

    def run(self) -> None:
        """Trace until standard input ends."""
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG | _WALL)
            except ChildProcessError:
                process, status = 0, 0
            if process:
                self._stopped(process, status)
                continue
            ready, _, _ = select.select([self.listener, sys.stdin], [], [], 0.0003)
            if sys.stdin in ready:
                return
            if self.listener in ready:
                self._seize()

    def _seize(self) -> None:
        connection, _ = self.listener.accept()
        with connection:
            process = int(connection.recv(32))
            if _libc.ptrace(_SEIZE, process, None, _OPTIONS) != 0:
                raise OSError(ctypes.get_errno(), "the process cannot be traced")
            connection.send(b"1")

    def _stopped(self, process: int, status: int) -> None:
        if not os.WIFSTOPPED(status):
            if self._under_way is not None and self._under_way[0] == process:
                self._end(process)
            self._waiting = [waiting for waiting in self._waiting if waiting[0] != process]
            return
        number, event = os.WSTOPSIG(status), status >> 16
        if event == _SECCOMP_EVENT:
            self._began(process)
        elif number == signal.SIGTRAP | 0x80:
            self._end(process)
            self._go(_CONT, process)
        elif event:
            self._go(_CONT, process)
        else:
            self._go(_CONT, process, number)

    def _began(self, process: int) -> None:
        _, _, number, *arguments = self._info(process)
        if number not in _CALLS:  # The process has been killed.
            return
        if not self._is_inside(process, _CALLS[number], arguments):
            self._go(_CONT, process)
            return
        self._waiting.append((process, number, arguments))
        self._next()

    def _is_inside(self, process: int, name: str, arguments: list[int]) -> bool:
        descriptor = self._descriptor(name, arguments)
        return descriptor is None or self.folder.number_of(process, descriptor) != 0

    @staticmethod
    def _descriptor(name: str, arguments: list[int]) -> int | None:
        if name in _DATA or name in _SYNC or name in _OUT:
            return arguments[0]
        return arguments[2] if name in _COPY else None

    def _next(self) -> None:
        if self._under_way is None and self._waiting:
            process, number, arguments = self._waiting.pop(0)
            descriptor = self._descriptor(_CALLS[number], arguments)
            if _CALLS[number] in _SYNC:  # mapped files are written without calls
                self._note("mapped", time.monotonic_ns(), process, descriptor)
            self._under_way = (process, number, -1 if descriptor is None else descriptor, time.monotonic_ns())
            self._go(_SYSCALL, process)

    def _end(self, process: int) -> None:
        if self._under_way is None or self._under_way[0] != process:
            return
        _, number, descriptor, start = self._under_way
        self._under_way = None
        if _CALLS[number] in _OPEN:  # it may have truncated an existing file
            descriptor = self._info(process)[2]
        self._note(_CALLS[number], start, process, descriptor if 0 <= descriptor < 1 << 31 else None)
        self._next()

    def _note(self, name: str, start: int, process: int, descriptor: int | None) -> None:
        changes, folders, files = self.folder.look()
        contents: dict[int, bytes] = {}
        for number, path in files:
            contents |= self.folder.read(number, path)
        target = 0 if descriptor is None else self.folder.number_of(process, descriptor)
        path = Path(f"/proc/{process}/fd/{descriptor}")
        if target and path.is_file():
            contents |= self.folder.read(target, path)
        synced = target if name in _SYNC else 0
        if changes or contents or synced:
            self.calls.append(Call(name, start, time.monotonic_ns(), changes, contents, folders, synced))

    @staticmethod
    def _info(process: int) -> tuple[int, ...]:
        info = ctypes.create_string_buffer(88)
        if _libc.ptrace(_CALL_INFO, process, 88, ctypes.addressof(info)) < 0:
            return (0, 0, 0, 0, 0, 0, 0, 0, 0)
        return struct.unpack_from("=QQQ6Q", info.raw, 8)

    @staticmethod
    def _go(request: int, process: int, number: int = 0) -> None:
        _libc.ptrace(request, process, None, number)  # fails if the process was killed; `waitpid` reports that


def main() -> None:
    folder, path, recording = map(Path, sys.argv[1:])
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(64)
    tracer = _Tracer(_Folder(folder), listener)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    with suppress(KeyboardInterrupt):
        tracer.run()
    recording.write_bytes(msgspec.msgpack.encode(Recording(tracer.calls)))


if __name__ == "__main__":
    main()

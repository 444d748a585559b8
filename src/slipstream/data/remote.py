"""Folders and files at URLs (`s3://`, and whatever else fsspec reaches), and a bounded cache of whole files.

An answer counts when it has the length that was asked for; anything else, and every failure that may pass, is
asked for again. Not here: what is in the files (`shards`, `sources`). fsspec is imported when a URL is
opened, and s3fs by it for `s3://`; credentials and endpoints are what those read (`AWS_PROFILE`,
`AWS_ENDPOINT_URL`, …).
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from slipstream.config import UserError

MEND = "prepare the data again, or copy the folder again"
"""What to do about a shard that is damaged or gone."""

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")
Range = tuple[str, int, int]
"""(name of a file, first byte, byte after the last)."""
ATTEMPTS = 6
FIRST_WAIT_S = 0.25
"""Waits double from here, with jitter. Clients of some stores (s3fs) try several times themselves in each
attempt.
"""
BLOCK = 2**24
"""Bytes of one request when a whole file is read."""
LOCAL = "file://"


def is_url(path: str | Path) -> bool:
    """Whether this is somewhere else than on the local disk; `file://` URLs are paths."""
    return "://" in str(path) and not str(path).startswith(LOCAL)


def local_path(path: str | Path) -> Path:
    return Path(str(path).removeprefix(LOCAL))


class RemoteFolder:
    """The files directly under a URL. `UserError` names the URL of whatever cannot be read or written."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self._fs, self._root = _open(self.url)

    def __str__(self) -> str:
        return self.url

    def sizes(self) -> dict[str, int]:
        """Bytes of every file by its name; empty where nothing is."""

        def look() -> dict[str, int]:
            try:
                found = self._fs.ls(self._root, detail=True)
            except FileNotFoundError:
                return {}
            # some stores list a folder as a file of its own name
            files = {str(f["name"]): f["size"] for f in found if f["type"] == "file"}
            return {
                p.rpartition("/")[2]: n for p, n in files.items() if p.strip("/") != self._root.strip("/")
            }

        return _persist(self.url, look)

    def size(self, name: str) -> int:
        """Bytes of a file; `UserError` where there is none."""
        return _persist(f"{self.url}/{name}", lambda: self._fs.info(f"{self._root}/{name}")["size"])

    def read(self, name: str) -> bytes:
        """A whole, small file."""
        return self.ranges([(name, 0, self.size(name))])[0]

    def ranges(self, wanted: Sequence[Range]) -> list[bytes]:
        """The bytes of every range, asked for at once."""
        out: dict[int, bytes] = {}

        def ask() -> None:
            left = [k for k in range(len(wanted)) if k not in out]
            names, starts, ends = zip(*(wanted[k] for k in left), strict=True)
            paths = [f"{self._root}/{name}" for name in names]
            found = self._fs.cat_ranges(paths, list(starts), list(ends), on_error="return")
            wrong: Exception | None = None
            for k, data in zip(left, found, strict=True):
                name, start, end = wanted[k]
                if isinstance(data, Exception):
                    wrong = _Named(name, data)
                elif len(data) != end - start:
                    wrong = _Named(name, OSError(f"{len(data)} bytes came of {end - start}"))
                else:
                    out[k] = bytes(data)
            if wrong is not None:
                raise wrong

        if wanted:
            _persist(self.url, ask)
        return [out[k] for k in range(len(wanted))]

    def blocks(self, name: str, size: int) -> Iterator[bytes]:
        """A whole file in blocks."""
        for start in range(0, size, BLOCK):
            yield self.ranges([(name, start, min(size, start + BLOCK))])[0]

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """A long range, in blocks asked for at once."""
        cuts = [*range(start, end, BLOCK), end]
        return b"".join(self.ranges([(name, a, b) for a, b in itertools.pairwise(cuts)]))

    def write(self, name: str, data: bytes) -> None:
        """The file appears when all of it is there."""

        def put() -> None:
            self._fs.pipe_file(f"{self._root}/{name}", data)
            size = self._fs.info(f"{self._root}/{name}")["size"]
            if size != len(data):
                raise OSError(f"{size} bytes arrived of {len(data)}")

        _persist(f"{self.url}/{name}", put)

    def remove(self, name: str) -> None:
        def gone() -> None:
            try:
                self._fs.rm_file(f"{self._root}/{name}")
            except FileNotFoundError:
                return

        _persist(f"{self.url}/{name}", gone)


def open_remote(url: str) -> BinaryIO:
    """A file to read and seek in."""
    place, _, name = url.rpartition("/")
    folder = RemoteFolder(place)
    return io.BufferedReader(_RemoteFile(folder, name, folder.size(name)), BLOCK)  # type: ignore[return-value]


def matching(pattern: str) -> list[str]:
    """URLs of the files that match, in the order of their names."""
    fs, root = _open(pattern)
    found = _persist(pattern, lambda: sorted(map(str, fs.glob(root))))
    if not found:
        raise UserError(f"{pattern}: matches no file; check the URL")
    return [str(fs.unstrip_protocol(path)) for path in found]


def version(url: str) -> tuple[int, str]:
    """(bytes, a word that changes with the contents) of a file."""
    fs, path = _open(url)
    facts = _persist(url, lambda: fs.info(path))
    return facts["size"], str(facts.get("ETag") or _persist(url, lambda: fs.ukey(path))).strip('"')


class _RemoteFile(io.RawIOBase):
    def __init__(self, folder: RemoteFolder, name: str, size: int):
        self.folder, self.file, self.size, self._at = folder, name, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        return self._at

    def readinto(self, buffer) -> int:  # a writable buffer has no name in typing before 3.12
        end = min(self.size, self._at + len(buffer))
        if end <= self._at:
            return 0
        data = self.folder.ranges([(self.file, self._at, end)])[0]
        buffer[: len(data)] = data
        self._at = end
        return len(data)


def _open(url: str) -> tuple[AbstractFileSystem, str]:
    mend = "pip install 'slipstream[s3]'"
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise UserError(f"{url}: reading URLs needs fsspec: {mend}") from None
    try:
        return url_to_fs(url, use_listings_cache=False)
    except ImportError as e:
        raise UserError(f"{url}: {' '.join(str(e).split())}: {mend}") from None
    except ValueError as e:
        raise UserError(f"{url}: {' '.join(str(e).split())}; check the URL") from None


class _Named(Exception):
    """What went wrong with one of several files."""

    def __init__(self, name: str, error: Exception):
        super().__init__(name, error)
        self.name, self.error = name, error


def _persist(url: str, do: Callable[[], T]) -> T:
    """`do()`, again after failures that may pass. `UserError` names the URL in the end."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return do()
        except Exception as e:  # each store has errors of its own kinds, with no common name
            what, e = (f"{url}/{e.name}", e.error) if isinstance(e, _Named) else (url, e)
            why = " ".join(f"{type(e).__name__}: {e}".split())[:200]
            if isinstance(e, FileNotFoundError):
                raise UserError(f"{what}: no such file or bucket ({why}); check the URL") from None
            if isinstance(e, PermissionError):
                raise UserError(f"{what}: no permission ({why}); check the credentials") from None
            if attempt == ATTEMPTS:
                mend = "run the same command again when the store answers"
                raise UserError(f"{what}: failed {ATTEMPTS} times ({why}); {mend}") from e
        time.sleep(FIRST_WAIT_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
    raise AssertionError


@dataclass(frozen=True)
class KnownFile:
    """A file as a manifest knows it."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Cache:
    """Whole files by their SHA-256 in a local folder of at most `limit` bytes; the longest unused go first.

    Shared by processes: a file is fetched by one of them. An open file that is removed stays readable.
    """

    folder: Path
    limit: int

    def find(self, file: KnownFile) -> Path | None:
        """The local copy, now the latest used; None where there is none."""
        path = self.folder / file.sha256
        try:
            os.utime(path)
            return path if path.stat().st_size == file.bytes else None
        except FileNotFoundError:
            return None

    def fetch(self, remote: RemoteFolder, file: KnownFile) -> bool:
        """Bring a file here, verified; False where another process is at it. `UserError` if it is corrupt."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path, partial = self.folder / file.sha256, self.folder / f"{file.sha256}.part"
        with open(os.open(partial, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as part:
            try:
                fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with its process, however that ends
            except BlockingIOError:
                return False
            if self.find(file) is not None:
                partial.unlink(missing_ok=True)
                return True
            part.truncate(0)
            self._make_room(file.bytes)
            part.truncate(file.bytes)  # what others make room beside
            for _ in range(2):  # what was garbled on the way is right the second time
                part.seek(0)
                digest = hashlib.sha256()
                for block in remote.blocks(file.name, file.bytes):
                    digest.update(block)
                    part.write(block)
                if digest.hexdigest() == file.sha256:
                    break
            else:
                part.truncate(0)
                raise corrupt(f"{remote.url}/{file.name}")
            part.flush()
            os.fsync(part.fileno())
            partial.rename(path)
        return True

    def drop(self, file: KnownFile) -> None:
        (self.folder / file.sha256).unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        found = [(p, s) for p in self.folder.iterdir() if (s := _stat(p)) is not None]
        used = sum(s.st_size for _, s in found)
        whole = [(p, s) for p, s in found if p.suffix != ".part"]
        for path, facts in sorted(whole, key=lambda f: f[1].st_mtime_ns):
            if used + size <= self.limit:
                return
            path.unlink(missing_ok=True)
            used -= facts.st_size


def corrupt(where: str) -> UserError:
    return UserError(f"{where}: corrupt: its sha256 is not the manifest's; {MEND}")


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:  # another process made room
        return None


class Prefetch:
    """A thread that brings files into the cache, one after the other; what it meets is raised by `check`."""

    def __init__(self, remote: RemoteFolder, cache: Cache, files: Sequence[KnownFile]):
        self._error: UserError | None = None
        self._thread = threading.Thread(target=self._run, args=(remote, cache, files), daemon=True)
        self._thread.start()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self, remote: RemoteFolder, cache: Cache, files: Sequence[KnownFile]) -> None:
        try:
            left = list(files)
            while left := [f for f in left if cache.find(f) is None and not cache.fetch(remote, f)]:
                time.sleep(1)  # other processes are at these
        except UserError as e:
            self._error = e
        except OSError as e:
            self._error = UserError(f"{cache.folder}: {e.strerror}: free space or name another --data-cache")

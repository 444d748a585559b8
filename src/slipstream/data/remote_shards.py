"""Shards at a URL: read from the local cache once they are there, range by range before, and where they never
fit.

Rows take documents from anywhere in the data, so no order of fetching whole shards would serve them: a row
that waited for its shards would fetch thousands of times what it reads. A row's documents are therefore asked
for by their ranges, all at once, while a thread fetches whole shards; what is in the cache needs no request.
Not here: requests and the cache itself (`remote`), the layout (`layout`).
"""

from __future__ import annotations

import numpy as np

from slipstream.data.layout import (
    HEADER_AT_MOST,
    Shard,
    ShardFile,
    check_index,
    check_size,
    map_shard,
    read_layout,
)
from slipstream.data.remote import Cache, Prefetch, Range, RemoteFolder


class RemoteSplit:
    """The folder of a split's remote shards, and the thread that fetches into the cache those that fit."""

    def __init__(self, folder: RemoteFolder, cache: Cache, files: list[ShardFile]):
        self.folder, self.cache, self.files = folder, cache, files
        self._prefetch: Prefetch | None = None

    def ranges(self, wanted: list[Range]) -> list[bytes]:
        """What is not in the cache yet, or never will be. Fetching starts with the first call."""
        if self._prefetch is None:
            self._prefetch = Prefetch(self.folder, self.cache, self.files)
        self._prefetch.check()
        return self.folder.ranges(wanted)


class RemoteShard:
    """A shard at a URL: read from the cache where it has arrived, else range by range."""

    def __init__(self, split: RemoteSplit, known: ShardFile, start: bytes):
        self.split, self.known = split, known
        self.path = f"{split.folder}/{known.name}"
        self.largest_id = known.largest_id
        self._layout = read_layout(self.path, known, start)
        self.offsets, self.checks = (
            np.frombuffer(start, dtype, count, at) for dtype, at, count in self._layout[:2]
        )
        check_index(self.path, known, self.offsets)
        self._local: Shard | None = None

    def local(self) -> Shard | None:
        """The copy in the cache. One that another process made room with is let go."""
        copy = self.split.cache.find(self.known)
        if copy is None:
            self._local = None
        elif self._local is None:
            try:
                self._local = map_shard(copy, self.known)
            except FileNotFoundError:  # removed just now
                return None
        return self._local

    def forget(self) -> None:
        """Leave out a damaged copy."""
        self._local = None
        self.split.cache.drop(self.known)

    def ranges(self, start: int, end: int) -> list[Range]:
        """Where tokens and mask of the shard's tokens `start` to `end` lie in the file."""
        places = [(at, np.dtype(dtype).itemsize) for dtype, at, _ in self._layout[2:]]
        return [(self.known.name, at + start * size, at + end * size) for at, size in places]

    @property
    def tokens(self) -> np.ndarray:
        return self._whole(0)

    @property
    def supervised(self) -> np.ndarray:
        return self._whole(1)

    def _whole(self, which: int) -> np.ndarray:
        local = self.local()
        if local is not None:
            return (local.tokens, local.supervised)[which]
        name, start, end = self.ranges(0, self.known.tokens)[which]
        return np.frombuffer(self.split.folder.read_range(name, start, end), self._layout[2 + which][0])


def open_remote_shards(
    folder: RemoteFolder, sizes: dict[str, int], files: list[ShardFile], cache: Cache, kept: list[ShardFile]
) -> list[RemoteShard]:
    """The shards `files` of a split; `sizes` are those of all files in the folder. Of each shard the header,
    offsets and checks are read. `kept` go into the cache as a whole.
    """
    for f in files:
        check_size(f"{folder}/{f.name}", sizes.get(f.name), f)
    index = [8 * (f.documents + 1) + 4 * f.documents for f in files]
    ends = [min(f.bytes, 8 + HEADER_AT_MOST + n) for f, n in zip(files, index, strict=True)]
    starts = folder.ranges([(f.name, 0, end) for f, end in zip(files, ends, strict=True)])
    split = RemoteSplit(folder, cache, kept)
    return [RemoteShard(split, f, start) for f, start in zip(files, starts, strict=True)]

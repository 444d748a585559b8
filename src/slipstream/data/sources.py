"""Records of files, on the local disk or at URLs, with the place each came from.

Here: JSON Lines (plain, gzip, zstandard), Parquet and Arrow files, cut into chunks of neighbouring records
that any process can parse. Not here: what a record means (`records`), how a URL is read (`remote`).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.config import UserError
from slipstream.data.records import TOKEN_COLUMNS
from slipstream.data.remote import is_url, local_path, matching, open_remote, version

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow")
CHUNK_BYTES = 2**19
"""About as many bytes of records are a chunk: some hundred chats, a tenth of a second of tokenising."""


@dataclass(frozen=True)
class Record:
    """One record: `where` is "file:line", or "file:row 0" and so on."""

    where: str
    value: dict[str, Any]


@dataclass(frozen=True)
class Chunk:
    """Neighbouring records of a file, not parsed yet: lines, or a batch as an Arrow stream."""

    path: str
    first: int
    """Number of the first line, from 1, or of the first row, from 0."""
    held: list[bytes] | bytes
    count: int
    """Records in it."""
    at_byte: int
    """How much of the file was read for it."""

    def records(self) -> Iterator[Record]:
        """Token columns of Arrow and Parquet files come as numpy arrays."""
        return _parse_lines(self.path, self.first, self.held) if isinstance(self.held, list) else self._rows()

    def _rows(self) -> Iterator[Record]:
        batch = pa.ipc.open_stream(self.held).read_next_batch()
        columns = {name: _column(batch, name) for name in batch.schema.names}
        for i in range(batch.num_rows):
            where = f"{self.path}:row {self.first + i}"
            for name in TOKEN_COLUMNS:
                if name in columns and columns[name][i] is None:
                    raise UserError(f"{where}: {name}: null; give a list of token ids or remove the row")
            yield Record(where, {name: column[i] for name, column in columns.items()})


def is_source(path: str | Path) -> bool:
    return str(path).endswith(SUFFIXES)


def find_sources(given: str) -> list[str]:
    """The files that `--input` names: a path, a URL, or the matches of a URL with `*` in it.

    `UserError` unless this module reads them.
    """
    if is_url(given):
        files = matching(given) if "*" in given else [given]
    else:
        path = local_path(given)
        if not path.exists():
            raise UserError(f"{path}: no such file; check the input path")
        if path.is_dir():
            raise UserError(f"{path}: a folder; name the files in it ({', '.join(SUFFIXES)})")
        files = [str(path)]
    for file in files:
        if not is_source(file):
            raise UserError(
                f"{file}: unknown kind of file; use {', '.join(SUFFIXES)} (one conversation a line or row)"
            )
    return files


def file_sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def describe_source(path: str) -> dict[str, Any]:
    """What the manifest keeps of an input: path, bytes, and sha256 or the store's version."""
    if is_url(path):
        size, known = version(path)
        return {"path": path, "bytes": size, "version": known}
    return {"path": path, "bytes": Path(path).stat().st_size, "sha256": file_sha256(Path(path))}


def source_bytes(path: str) -> int:
    return version(path)[0] if is_url(path) else Path(path).stat().st_size


def iter_records(path: str | Path) -> Iterator[Record]:
    """Every record of a file, in order."""
    for given in find_sources(str(path)):
        for chunk in iter_chunks(given):
            yield from chunk.records()


def iter_chunks(path: str, limit: int | None = None) -> Iterator[Chunk]:
    """A file's records, in order, at most `limit` of them. The same file gives the same chunks."""
    try:
        with open_remote(path) if is_url(path) else open(path, "rb") as raw:
            chunks = _chunks_of_lines(path, raw) if ".jsonl" in path[-10:] else _chunks_of_rows(path, raw)
            for chunk in chunks:
                if limit is not None and chunk.count > limit:
                    chunk = _first(chunk, limit)
                yield chunk
                if limit is not None and not (limit := limit - chunk.count):
                    return
    except (gzip.BadGzipFile, EOFError, zlib.error) as e:
        raise UserError(f"{path}: broken gzip file ({e}); write or copy it again") from None
    except pa.ArrowInvalid as e:
        kind = path.rpartition(".")[2]
        raise UserError(f"{path}: not readable as {kind} ({' '.join(str(e).split())[:120]})") from None
    except OSError as e:
        raise UserError(f"{path}: cannot read: {e.strerror or ' '.join(str(e).split())[:120]}") from None


def _first(chunk: Chunk, limit: int) -> Chunk:
    if isinstance(chunk.held, bytes):
        batch = pa.ipc.open_stream(chunk.held).read_next_batch().slice(0, limit)
        return Chunk(chunk.path, chunk.first, _as_stream(batch), limit, chunk.at_byte)
    full = [i for i, line in enumerate(chunk.held) if line.strip()]
    return Chunk(chunk.path, chunk.first, chunk.held[: full[limit - 1] + 1], limit, chunk.at_byte)


def _chunks_of_lines(path: str, raw: BinaryIO) -> Iterator[Chunk]:
    lines: Any = raw
    if path.endswith(".gz"):
        lines = io.BufferedReader(gzip.GzipFile(fileobj=raw), CHUNK_BYTES)  # type: ignore[arg-type]
    elif path.endswith(".zst"):
        lines = io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd"), CHUNK_BYTES)
    number = 1
    while held := lines.readlines(CHUNK_BYTES):
        yield Chunk(path, number, held, sum(not line.isspace() for line in held), raw.tell())
        number += len(held)


def _parse_lines(path: str, first: int, lines: list[bytes]) -> Iterator[Record]:
    for number, line in enumerate(lines, first):
        if line.isspace():
            continue
        where = f"{path}:{number}"
        try:
            value = json.loads(line.strip())
        except json.JSONDecodeError as e:
            raise UserError(
                f"{where}: broken JSON at column {e.colno}: {e.msg}; mend or remove the line"
            ) from None
        except UnicodeDecodeError as e:
            raise UserError(f"{where}: not UTF-8 at byte {e.start}; write the file as UTF-8") from None
        except (ValueError, RecursionError) as e:  # a number of thousands of digits, nested thousands deep
            raise UserError(f"{where}: not readable as JSON ({e}); mend or remove the line") from None
        if not isinstance(value, dict):
            raise UserError(f"{where}: expected an object, found a {type(value).__name__}; one record a line")
        yield Record(where, value)


def _chunks_of_rows(path: str, raw: BinaryIO) -> Iterator[Chunk]:
    size, row = raw.seek(0, io.SEEK_END), 0
    raw.seek(0)
    for batch, share in _batches(path, raw):
        batch.validate(full=True)  # a damaged Arrow file may point anywhere in memory, or hold no UTF-8
        if twice := [n for n, times in Counter(batch.schema.names).items() if times > 1]:
            raise UserError(f"{path}: {twice[0]}: two columns of this name; rename or remove one")
        step = max(1, CHUNK_BYTES * batch.num_rows // max(1, batch.nbytes))
        for start in range(0, batch.num_rows, step):
            held = batch.slice(start, step)
            yield Chunk(path, row, _as_stream(held), held.num_rows, int(size * share))
            row += held.num_rows


def _as_stream(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _batches(path: str, raw: BinaryIO) -> Iterator[tuple[pa.RecordBatch, float]]:
    """Record batches, each with the share of the file read once it is through."""
    if path.endswith(".parquet"):
        file = pq.ParquetFile(raw if is_url(path) else path, buffer_size=CHUNK_BYTES)
        rows = 0
        for batch in file.iter_batches(batch_size=1024):
            rows += batch.num_rows
            yield batch, rows / file.metadata.num_rows
        return
    source = pa.PythonFile(raw, "r") if is_url(path) else pa.memory_map(path)
    try:
        file = pa.ipc.open_file(source)
    except pa.ArrowInvalid:  # Arrow's other framing: a stream
        source.seek(0)
        for batch in pa.ipc.open_stream(source):
            yield batch, source.tell() / max(1, source.size())
        return
    for i in range(file.num_record_batches):
        yield file.get_batch(i), (i + 1) / file.num_record_batches


def _column(batch: pa.RecordBatch, name: str) -> list[Any]:
    column = batch.column(name)
    is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    if name not in TOKEN_COLUMNS or not is_list or not pa.types.is_integer(column.type.value_type):
        return column.to_pylist()
    # the offsets point into the whole buffer, also where the batch is a slice of it
    values = column.values.to_numpy(zero_copy_only=False)  # type: ignore[attr-defined]
    offsets = column.offsets.to_numpy()  # type: ignore[attr-defined]
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    return [values[offsets[i] : offsets[i + 1]] if valid[i] else None for i in range(len(column))]

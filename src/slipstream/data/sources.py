"""Records from local files, with the place each came from.

Here: JSON Lines (plain or gzip), Parquet and Arrow files, one record at a time. Not here: what a record means
(`chat`), object stores, the hub.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.config import UserError
from slipstream.data.chat import TOKEN_COLUMNS

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".arrow")


@dataclass(frozen=True)
class Record:
    """One record: `where` is "file:line" (or row), `at_byte` how much of the file was read by then."""

    where: str
    value: dict[str, Any]
    at_byte: int


def is_source(path: Path) -> bool:
    return path.name.endswith(SUFFIXES)


def check_source(path: Path) -> None:
    """`UserError` unless `path` is a file this module reads."""
    if not path.exists():
        raise UserError(f"{path}: no such file; check the input path")
    if path.is_dir():
        raise UserError(f"{path}: a folder; name the files in it ({', '.join(SUFFIXES)})")
    if not is_source(path):
        raise UserError(
            f"{path}: unknown kind of file; use {', '.join(SUFFIXES)} (one conversation a line or row)"
        )


def file_sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def iter_records(path: Path) -> Iterator[Record]:
    """Every record of a file, in order. Token columns of Arrow and Parquet files come as numpy arrays."""
    check_source(path)
    try:
        yield from _iter_lines(path) if path.name.endswith((".jsonl", ".jsonl.gz")) else _iter_rows(path)
    except (gzip.BadGzipFile, EOFError, zlib.error) as e:
        raise UserError(f"{path}: broken gzip file ({e}); write or copy it again") from None
    except pa.ArrowInvalid as e:
        raise UserError(
            f"{path}: not readable as {path.suffix[1:]} ({' '.join(str(e).split())[:120]})"
        ) from None
    except OSError as e:
        raise UserError(f"{path}: cannot read: {e.strerror or e}") from None


def _iter_lines(path: Path) -> Iterator[Record]:
    with path.open("rb") as raw:
        lines = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        for number, line in enumerate(lines, 1):
            if not line.strip():
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
            if not isinstance(value, dict):
                raise UserError(
                    f"{where}: expected an object, found a {type(value).__name__}; one record a line"
                )
            yield Record(where, value, raw.tell())


def _iter_rows(path: Path) -> Iterator[Record]:
    size, row = path.stat().st_size, 0
    for batch, share in _batches(path):
        columns = {name: _column(batch, name) for name in batch.schema.names}
        for i in range(batch.num_rows):
            where = f"{path}:row {row}"
            value = {}
            for name, column in columns.items():
                value[name] = column[i]
                if name in TOKEN_COLUMNS and column[i] is None:
                    raise UserError(f"{where}: {name}: null; give a list of token ids or remove the row")
            yield Record(where, value, int(size * share))
            row += 1


def _batches(path: Path) -> Iterator[tuple[pa.RecordBatch, float]]:
    """Record batches, each with the share of the file read once it is through."""
    if path.suffix == ".parquet":
        file = pq.ParquetFile(path)
        groups = file.metadata.num_row_groups
        for g in range(groups):
            for batch in file.read_row_group(g).to_batches():
                yield batch, (g + 1) / groups
        return
    source = pa.memory_map(str(path))
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

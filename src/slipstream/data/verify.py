"""`slipstream data verify`: is every byte of prepared shards what `prepare` wrote.

Here: all faults of a dataset, each by the name of its shard. Opening a dataset (`shards`) ends at the first.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from slipstream.config import UserError
from slipstream.data.layout import MANIFEST, SPLITS, ShardFile, check_size, document_check, open_shard
from slipstream.data.remote import Cache, RemoteFolder, is_url, local_path
from slipstream.data.shards import Manifest, read_manifest


def verify(data_dir: str) -> tuple[list[str], list[str]]:
    """(what was found right, every fault), a line each. Shards at a URL are fetched one by one.

    `UserError` where there is no dataset at all.
    """
    folder = RemoteFolder(data_dir) if is_url(data_dir) else local_path(data_dir)
    if isinstance(folder, Path) and not (folder / MANIFEST).exists():
        raise UserError(f"{folder}: no {MANIFEST} in it: not a finished `slipstream prepare`")
    manifest = read_manifest(folder)
    right, faults = [], []
    for split in SPLITS:
        whole = []
        for file in manifest.splits[split]:
            found = list(_faults(folder, file, manifest))
            faults += found
            whole += [file] if not found else []
        documents, tokens = sum(f.documents for f in whole), sum(f.tokens for f in whole)
        right.append(
            f"{split}: {len(whole)} shards with {documents:,} documents of {tokens:,} tokens are whole"
        )
    if (counted := manifest.counts.get("documents")) is not None:
        stored = sum(f.documents for s in SPLITS for f in manifest.splits[s])
        if stored != counted:
            faults.append(f"{folder}/{MANIFEST}: {stored} documents in its shards, {counted} in its counts")
    return right, faults


def _faults(folder: Path | RemoteFolder, file: ShardFile, manifest: Manifest) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as scratch:
        try:
            if isinstance(folder, RemoteFolder):
                check_size(f"{folder}/{file.name}", folder.sizes().get(file.name), file)
                cache = Cache(Path(scratch), file.bytes)
                cache.fetch(folder, file)
                path = cache.find(file)
                assert path is not None
            else:
                path = folder / file.name
            shard = open_shard(path, file, whole=True)
        except UserError as e:
            yield str(e)
            return
        where = f"{folder}/{file.name}"
        assert shard.checks is not None
        tokens, supervised = np.asarray(shard.tokens), np.asarray(shard.supervised)
        if (largest := int(tokens.max())) >= manifest.vocab_size:
            yield f"{where}: token id {largest} in a vocabulary of {manifest.vocab_size}"
        if supervised.max() > 1:
            yield f"{where}: a mask value that is neither 0 nor 1"
        counts = (int(supervised.sum()), largest)
        if counts != (file.supervised_tokens, file.largest_id):
            yield f"{where}: supervised tokens and largest id are {counts}, the manifest has others"
        spans = itertools.pairwise(shard.offsets.tolist())
        wrong = [
            k
            for k, (a, b) in enumerate(spans)
            if document_check(tokens[a:b], supervised[a:b]) != shard.checks[k]
        ]
        if wrong:
            yield f"{where}: {len(wrong)} documents are not what their checks say, the first is {wrong[0]}"

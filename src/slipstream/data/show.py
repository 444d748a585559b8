"""`slipstream prepare --show N`: conversations as the model is given them, and what is supervised.

Here: reading until N are found, printing. What becomes of a record is `render`'s, as in a real run; only
copies and hold-out, which need all records, are not looked at.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.text import Text

from slipstream.config import PrepareConfig, UserError
from slipstream.data.records import Document
from slipstream.data.render import Kept, Renderer
from slipstream.data.sources import find_sources, iter_chunks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HEAD, TAIL = 1000, 400
"""Characters shown of a longer run of text: of its beginning and of its end."""


def show(config: PrepareConfig, console: Console) -> None:
    """Print the first `config.show` conversations of use, then what was left out on the way to them.

    Supervised text is bold and green; where no colours can be shown it stands between ⟦ and ⟧. `UserError`
    if no record is of use.
    """
    assert config.show
    renderer = Renderer(config)
    shown = records = 0
    skipped: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    paths = [path for given in config.input for path in find_sources(given)]
    for chunk in (c for path in paths for c in iter_chunks(path, config.limit)):
        batch = renderer(chunk)
        records += batch.records
        skipped += batch.skipped
        counts += batch.counts
        examples = {**batch.examples, **examples}
        for kept, documents in batch.documents():
            if shown < config.show:
                shown += 1
                _print_record(console, kept, documents, renderer.tokenizer)
        if shown == config.show:
            break
    for reason, n in skipped.most_common():
        console.print(Text(f"left out: {n} {reason} (the first: {examples[reason]})"), soft_wrap=True)
    if not shown:
        raise UserError(
            f"{', '.join(config.input)}: none of {records} records is of use; left out as said above"
        )
    kept = records - skipped.total()
    facts = "".join(f", {n} {what}" for what, n in counts.items() if n)
    console.print(
        Text(f"show: {shown} of {kept} kept among the first {records} records{facts}"), soft_wrap=True
    )
    console.print(Text("nothing was written: leave --show out to prepare them"), soft_wrap=True)


def _print_record(
    console: Console, kept: Kept, documents: list[Document], tokenizer: PreTrainedTokenizerBase
) -> None:
    done = "".join(f", {n} {what}" for what, n in kept.counts.items())
    for k, document in enumerate(documents, 1):
        which = f", document {k} of {len(documents)}" if len(documents) > 1 else ""
        facts = f"{len(document.ids)} tokens, {int(document.supervised.sum())} supervised"
        console.print(Text(f"── {kept.where}{which}: {facts}{done}", "bold"), soft_wrap=True)
        console.print(coloured(document, tokenizer, marks=not console.is_terminal), soft_wrap=True)


def coloured(document: Document, tokenizer: PreTrainedTokenizerBase, marks: bool) -> Text:
    """A document's text, special tokens included, each run of supervised tokens in colour or in ⟦marks⟧."""
    out = Text()
    edges = [0, *(np.flatnonzero(np.diff(document.supervised)) + 1).tolist(), len(document.ids)]
    for a, b in itertools.pairwise(edges):
        text = str(tokenizer.decode(document.ids[a:b].tolist()))
        if len(text) > HEAD + TAIL:
            text = f"{text[:HEAD]}\n[… {len(text) - HEAD - TAIL} characters …]\n{text[-TAIL:]}"
        said = bool(document.supervised[a])
        out.append(f"⟦{text}⟧" if said and marks else text, "bold green" if said else "dim")
    return out

"""Small tokenizers and chat templates, made in the test: nothing is downloaded."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slipstream.data.records import Document
from slipstream.data.shards import Shard, TokenDataset

CORPUS = [
    "The user asks a question and the assistant answers it, word by word.\n\n",
    "system user assistant\nHello there! What is two and two? Four.\n",
    "<think>\n\n</think>\n\nYes, no, maybe.\n\n",
]

# words with a blank before them, runs of newlines in one piece: how today's byte-level tokenizers cut
WORDS = Regex(r" ?\w+| ?[^\s\w]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

CHATML = r"""{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""

# ChatML with marks: `BEFORE` and `AFTER` stand where an author may open and close them
CHATML_MARKED = r"""{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
OPEN0{{- '<|im_start|>assistant\n' -}}
OPEN1{{- m.content -}}
CLOSE0{{- '<|im_end|>' -}}
CLOSE1{{- '\n' -}}
CLOSE2
{%- else -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""

LLAMA3 = r"""{{- bos_token -}}{%- for m in messages -%}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}"""

# Thinking as Qwen3 does it: earlier turns lose it, the last turn always has a block, and without thinking the
# generation prompt holds an empty one.
THINKING = r"""{%- set ns = namespace(user=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set ns.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- set parts = m.content.split('</think>') -%}
{%- set thought = m.reasoning_content or '' -%}
{%- if parts | length > 1 -%}{%- set thought = parts[0].split('<think>')[-1].strip('\n') -%}{%- endif -%}
{%- if m.role == 'assistant' and loop.index0 > ns.user and (loop.last or thought) -%}
{{- '<think>\n' + thought + '\n</think>\n\n' -}}
{%- endif -%}
{{- parts[-1].lstrip('\n') + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}"""

INST = r"""{{- bos_token -}}{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '[INST] ' + m.content + ' [/INST]' -}}
{%- elif m.role == 'assistant' -%}{{- ' ' + m.content + eos_token -}}
{%- else -%}{{- raise_exception('only user and assistant roles') -}}{%- endif -%}{%- endfor -%}"""


def marked(opening: str, closing: str) -> str:
    """ChatML with its generation marks opened and closed at the named places."""
    text = CHATML_MARKED
    for place in ("OPEN0", "OPEN1"):
        text = text.replace(place, "{%- generation -%}" if place == opening else "")
    for place in ("CLOSE0", "CLOSE1", "CLOSE2"):
        text = text.replace(place, "{%- endgeneration -%}" if place == closing else "")
    return text


@functools.cache
def _byte_level(specials: tuple[str, ...], rstrip: bool) -> str:
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(WORDS, "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(s, special=True, normalized=False, rstrip=rstrip) for s in specials]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=added, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


def byte_tokenizer(template: str | None = CHATML, rstrip: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE with ChatML's and Llama 3's special tokens; eos is what the template ends turns with."""
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>")
    specials += ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    eos = "<|eot_id|>" if template == LLAMA3 else "<|im_end|>"
    inner = Tokenizer.from_str(_byte_level(specials, rstrip))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos, bos_token="<|bos|>")
    tokenizer.chat_template = template
    return tokenizer


def blank_prefix_tokenizer(template: str = INST) -> PreTrainedTokenizerFast:
    """A SentencePiece-like BPE that writes a blank before every text: pieces cannot be tokenised apart."""
    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    inner.decoder = decoders.Metaspace(prepend_scheme="always")
    specials = ["<unk>", "<s>", "</s>"]
    alphabet = sorted({c for text in CORPUS for c in text} | set("[]/INSTb?▁"))
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = template
    return tokenizer


def supervised_texts(tokenizer: PreTrainedTokenizerFast, document: Document) -> list[str]:
    """The text of every unbroken run of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.r_[False, document.supervised, False].astype(int)))
    return [str(tokenizer.decode(document.ids[a:b])) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def chat(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """User and assistant messages in turn."""
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": t} for i, t in enumerate(texts)]
    return ([{"role": "system", "content": system}] if system else []) + messages


def write_jsonl(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def memory_dataset(documents: list[Document]) -> TokenDataset:
    """A training split that was never on disk."""
    lengths = np.array([len(d.ids) for d in documents])
    tokens, supervised = (
        np.concatenate(x) for x in zip(*((d.ids, d.supervised) for d in documents), strict=True)
    )
    shard = Shard(Path("memory"), tokens, supervised, np.cumsum([0, *lengths]))
    return TokenDataset("train", lengths, "memory", None, None, (), {}, (shard,), (0,))

"""Settings of the verbs that make and look at data; config.py has the others, and how they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PrepareConfig:
    """Chats or ready token ids → token shards with a manifest."""

    input: tuple[str, ...] = ()
    """Files or URLs: JSONL (`.gz`, `.zst`), Parquet, Arrow; `messages`, `conversations`, or ready ids."""
    output_dir: str = ""
    """Folder or URL (`s3://…`) for the shards and their manifest; must be new or empty."""
    tokenizer: str = ""
    """The target's folder or hub name: its tokenizer and chat template render the conversations."""
    max_length: int = 8192
    """Longest document in tokens; `on_long` says what happens to a longer one."""
    on_long: Literal["truncate", "split", "reject"] = "truncate"
    """A longer document: its tail cut, cut into several documents, or left out (counted)."""
    holdout: float = 0.02
    """Share of conversations kept for validation, by a hash of their tokens (so a copy never leaks)."""
    thinking: bool | None = None
    """`enable_thinking` for templates that know it; unset leaves the template's own default."""
    shard_tokens: int = 16_777_216
    """Tokens a shard file holds at most."""
    limit: int | None = None
    """Read only that many conversations: for trying things out."""
    processes: int | None = None
    """Processes that render and tokenise (default: one a core); the result is the same."""
    decontaminate: tuple[str, ...] = ()
    """Evaluation files: a conversation that holds one of their questions is left out."""
    decontaminate_words: int = 13
    """Words in a row that a message and a question have in common when they are taken for the same."""
    show: int | None = None
    """Print that many conversations and what is supervised in them; nothing is written."""


@dataclass(frozen=True)
class DataConfig:
    """Look into a dataset: what it holds, and what packing and anchors would make of it."""

    task: Literal["verify", "stats"] = "stats"
    """`verify` checks every byte of prepared shards; `stats` counts, and packs for several row sizes."""
    data_dir: str = ""
    """Prepared shards, or a folder of tokenised completions."""
    json: bool = False
    """Figures as JSON."""
    png: str | None = None
    """Plot lengths, utilisation and coverage into this file (needs the `report` extra)."""


@dataclass(frozen=True)
class RegenerateConfig:
    """Prompts → answers of the target itself, from servers or on this machine's device."""

    output_dir: str = ""
    """Folder for `answers.jsonl` and the counts; a run of the same settings is continued."""
    input: tuple[str, ...] = ()
    """Prompt files, by record `messages`, `conversations`, `turns` or `prompt`; their answers are dropped."""
    self_prompt: int | None = None
    """Without input: conversations to make whose user turns the model writes too."""
    target_model: str = ""
    """Folder or hub name of the target; with servers only needed for `self_prompt`."""
    server: tuple[str, ...] = ()
    """Base URLs of OpenAI-compatible servers of the target; unset answers on this machine's device."""
    served_name: str | None = None
    """The model's name at the servers (default: the only one they list)."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Answers are drawn from the most likely tokens that have this probability together."""
    max_new_tokens: int = 2048
    """Tokens of an answer; a longer one is cut there, marked `finished: false`."""
    turns: int | None = None
    """Most answers in a conversation (default: all that the input asks for; 1 with `self_prompt`)."""
    thinking: bool | None = None
    """`enable_thinking` for templates that know it; unset leaves the template's own default."""
    seed: int = 0
    """Seed of the sampling; each turn draws by a seed of its own."""
    limit: int | None = None
    """Read only that many prompts: for trying things out."""
    concurrency: int = 64
    """Conversations that servers work on at the same time, all servers together."""
    timeout: float = 600.0
    """Seconds until a request to a server counts as failed."""
    retries: int = 8
    """How often a failed request is sent again, to any server."""
    batch_size: int | None = None
    """Conversations decoded at once on this machine (default: what its memory holds; 8 on a CPU)."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the target on this machine's device."""


@dataclass(frozen=True)
class CacheConfig:
    """Record the target's taps of every packed row, so that training needs no target pass."""

    target_model: str = ""
    """Folder or hub name of the target."""
    data_dir: str = ""
    """Prepared shards, or a folder of tokenised completions."""
    data_cache: str = "~/.cache/slipstream/data"
    """As in `train`."""
    data_cache_gib: float = 64.0
    """As in `train`."""
    output_dir: str = ""
    """Folder for the taps; must be new, or an unfinished cache of the same settings (it is continued)."""
    taps: int = 5
    """How many target layers are read; as in `train`."""
    target_layer_ids: tuple[int, ...] | None = None
    """0-based target layers whose output is read; as in `train`."""
    token_budget: int = 8192
    """Tokens in a packed row; as in `train`."""
    on_long: Literal["truncate", "split", "reject"] = "truncate"
    """As in `train`."""
    limit_rows: int | None = None
    """Record only the first rows of the plan's packing: training then sees these rows only."""
    heldout_rows: int = 8
    """Held-out rows recorded for validation."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the target and of the stored taps."""
    target_pass: Literal["auto", "fused", "stock"] = "auto"
    """As in `train`."""
    target_fp8: bool = False
    """As in `train`."""

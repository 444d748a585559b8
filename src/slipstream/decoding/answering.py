"""`slipstream regenerate` without a server: this process's device answers, many conversations at a time.

Lives here: which requests are decoded together, and how many. Not here: the decoding (batched.py), what is
asked (data/regenerate.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from slipstream.config import RegenerateConfig
from slipstream.data.chat import ChatTemplate
from slipstream.data.conversation import Answer, Request, Talk
from slipstream.data.journal import LeftOut
from slipstream.data.records import ChatError
from slipstream.data.regenerate import Regeneration
from slipstream.data.tokenizer import load_generation_config, stop_ids
from slipstream.decoding.batched import PASSES, Batch, Wish
from slipstream.decoding.columns import COLUMNS
from slipstream.models.target import Target, load_target
from slipstream.system.kernels import prepare_kernels
from slipstream.training.setup import choose_device, choose_dtype

_NUMBERS = itertools.count()
LOOK_AHEAD = 4096
"""Requests that wait at least, if there are so many: the longest go first, so that rows are of like length.
"""
MOST_ROWS = 2048
SHARE_OF_MEMORY = 0.4
"""Of what the target leaves free on a GPU, for the cache and the logits of the rows."""


def answer(config: RegenerateConfig, run: Regeneration, say: Callable[[str], None]) -> None:
    """Ends every missing conversation of `run` on this machine's device."""
    assert run.chat is not None
    if not run.left:
        return
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    if device.type == "cuda":
        for line in prepare_kernels():
            say(line)
    target = load_target(config.target_model, None, 1, device, dtype, "stock")
    stops = stop_ids(load_generation_config(config.target_model), run.chat.tokenizer)
    talks, waiting = run.talks(), []
    batch: Batch | None = None
    asked: dict[int, Talk] = {}
    while True:
        for talk in itertools.islice(talks, max(0, LOOK_AHEAD - len(waiting))):
            waiting += _next_wish(talk, run, target, stops, asked)
        waiting.sort(key=lambda w: len(w.ids))
        if batch is None and waiting:
            rows = config.batch_size or _rows_that_fit(target, len(waiting[-1].ids) + waiting[-1].max_new)
            batch = Batch(target, min(rows, len(waiting)))
            say(f"answering: {batch.rows} at a time, {str(dtype).removeprefix('torch.')} on {device}")
        if batch is None or (not waiting and batch.free == batch.rows):
            return
        if (
            waiting and batch.free * 16 >= batch.rows
        ):  # a pass over new prompts costs about as much as one more
            batch.admit([waiting.pop() for _ in range(min(batch.free, len(waiting)))])
        batch.decode(PASSES)
        for wish, tokens in batch.harvest():
            talk = asked.pop(wish.number)
            run.tokens += len(tokens)
            talk.reply(_answer(wish, tokens, talk.request, run.chat))
            waiting += _next_wish(talk, run, target, stops, asked)


def _next_wish(
    talk: Talk, run: Regeneration, target: Target, stops: frozenset[int], asked: dict[int, Talk]
) -> list[Wish]:
    """What a conversation asks for next; nothing, and its end counted, where it has ended."""
    assert run.chat is not None
    request, config = talk.request, target.config
    if request is not None:
        try:
            ids = request.ids or run.chat.prompt_ids(request.messages, request.tools)
        except ChatError as e:
            talk.give_up(LeftOut("skipped", e.reason, str(e)))
        else:
            room = config.max_position_embeddings - len(ids)
            if room > 0:
                more = set() if request.stop_id is None else {request.stop_id}
                max_new = min(request.max_new_tokens, room)
                sampling = (request.temperature, request.top_p, request.seed)
                wish = Wish(next(_NUMBERS), ids, max_new, stops | more, *sampling)
                asked[wish.number] = talk
                return [wish]
            talk.give_up(LeftOut("skipped", "prompt too long", f"{len(ids)} tokens"))
    run.end(talk)
    return []


def _answer(wish: Wish, tokens: list[int], request: Request | None, chat: ChatTemplate) -> Answer:
    assert request is not None
    finished = tokens[-1] in wish.stop_ids
    text = chat.tokenizer.decode(tokens[:-1] if finished else tokens)
    message = {"role": "assistant" if request.ids is None else "user", "content": text}
    return Answer(message, "stop" if finished else "length", len(tokens), wish.ids, tokens)


def _rows_that_fit(target: Target, columns: int) -> int:
    """Rows of so many columns that a part of the device's free memory holds; few on a CPU, whose cores are
    busy with one row already.
    """
    if target.device.type == "cpu":
        return 8
    facts = target.config.to_dict()
    heads = facts.get("num_key_value_heads") or facts["num_attention_heads"]
    width = facts.get("head_dim") or target.hidden_size // facts["num_attention_heads"]
    column = 2 * target.num_layers * heads * width * target.dtype.itemsize
    logits = 8 * 4 * target.vocab_size  # fp32, their order, and what sorting them takes
    free, _ = torch.cuda.mem_get_info(target.device)
    row = column * (-(-columns // COLUMNS) + 1) * COLUMNS + logits
    return max(1, min(MOST_ROWS, int(free * SHARE_OF_MEMORY / row)))

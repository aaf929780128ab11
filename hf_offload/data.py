"""From a recipe's data section to rows of token ids. Takes any transformers tokenizer; imports none.

A row is `{"input_ids": [...], "labels": [...]}`, plain lists of equal length; a label of -100 is not trained on.
"""

from __future__ import annotations

import fnmatch
import json
import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_offload.errors import RecipeError, explain, shown
from hf_offload.recipe import DataSpec, JsonlChat, PydocTopics, TextFiles

IGNORED = -100
Row = dict[str, list[int]]


@dataclass(frozen=True)
class Rows:
    """Training and evaluation rows, and sentences for the user about what was cut or left out."""

    train: list[Row]
    evaluation: list[Row]
    notes: tuple[str, ...] = ()


def build(spec: DataSpec, tokenizer: Any, seed: int) -> Rows:
    """Rows for the data section of a recipe.

    Args:
        seed: which rows are kept for evaluation.

    Raises:
        RecipeError: a file that does not exist or does not fit, or too little data for one row.
    """
    notes: list[str] = []
    if isinstance(spec, JsonlChat):
        rows = chat_rows(read_chats(Path(spec.path)), tokenizer, spec, notes)
    else:
        rows = blocks(_texts(spec), tokenizer, spec.block_size)
    if not rows:
        cause = "the data gives no row to train on"
        raise RecipeError(explain("data.block_size", spec.block_size, cause, "Give more data, or another block_size"))
    kept = round(spec.eval_fraction * len(rows))
    if spec.eval_fraction:
        kept = min(max(kept, 1), len(rows) - 1)
        random.Random(seed).shuffle(rows)
    return Rows(train=rows[kept:], evaluation=rows[:kept], notes=tuple(notes))


def _texts(spec: DataSpec) -> list[str]:
    if isinstance(spec, PydocTopics):
        from pydoc_data.topics import topics

        return [topics[name] for name in sorted(topics)]
    if not isinstance(spec, TextFiles):
        raise TypeError(f"no reader for {type(spec).__name__}")
    path = Path(spec.path)
    if os.path.isfile(path):
        return [_read(path)]
    if not os.path.isdir(path):
        raise RecipeError(explain("data.path", spec.path, "no such file or folder", "Give one that exists"))
    files = sorted(f for f in path.rglob("*") if f.is_file() and fnmatch.fnmatch(f.name, spec.pattern))
    if not files:
        cause = f"no file in this folder matches data.pattern={spec.pattern!r}"
        raise RecipeError(explain("data.path", spec.path, cause, "Give another folder or pattern"))
    return [_read(f) for f in files]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        cause = f"cannot be read: {error.strerror or error}"
        raise RecipeError(explain("data.path", str(path), cause, "Give a file that you may read")) from None
    except UnicodeDecodeError as error:
        raise RecipeError(explain("data.path", str(path), f"not UTF-8 text ({error})", "Save it as UTF-8")) from None


def blocks(texts: Iterable[str], tokenizer: Any, block_size: int) -> list[Row]:
    """All texts, each ended by the end-of-text token, as one stream cut into rows of `block_size`; the rest is left."""
    stream: list[int] = []
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for text in texts:
        # verbose=False: a text longer than the model's context is cut into rows below.
        stream += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] + end
    cuts = range(0, len(stream) - block_size + 1, block_size)
    return [{"input_ids": stream[i : i + block_size], "labels": stream[i : i + block_size]} for i in cuts]


def read_chats(path: Path) -> list[tuple[str, list[dict[str, str]]]]:
    """The chats of a JSON-lines file, each with where it stands (`file:line`). Raises RecipeError."""
    if not os.path.isfile(path):  # unlike Path's, also of names that are too long
        raise RecipeError(explain("data.path", str(path), "no such file", "Give a JSON-lines file that exists"))
    chats = []
    for number, line in enumerate(_read(path).split("\n"), start=1):  # JSON may hold U+2028, where splitlines cuts
        if line.strip():
            where = f"{path}:{number}"
            chats.append((where, _messages(line, where)))
    return chats


def _messages(line: str, where: str) -> list[dict[str, str]]:
    form = 'Write {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{where}: not JSON: {error}. {form}.") from None
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise RecipeError(f"{where}: has no list `messages`. {form}.")
    for message in messages:
        good = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not good:
            raise RecipeError(f"{where}: the message {shown(message)} has no text `role` and `content`. {form}.")
        if not all(_encodes(message[key]) for key in ("role", "content")):
            cause = f'the message {shown(message)} has half of a surrogate pair (as "\\ud83d"), which is no character'
            raise RecipeError(f"{where}: {cause}. Write the whole pair, or take it out.")
    return messages


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def chat_rows(
    chats: Sequence[tuple[str, list[dict[str, str]]]], tokenizer: Any, spec: JsonlChat, notes: list[str]
) -> list[Row]:
    """Rows of at most `block_size` tokens; chats with nothing to train on are left out, with a note."""
    if getattr(tokenizer, "chat_template", None) is None:
        cause = "the tokenizer has no chat template, which chats need"
        raise RecipeError(explain("data.kind", "jsonl", cause, "Use an instruct model's tokenizer, or kind: text"))
    rows, cut, empty = [], 0, 0
    for where, messages in chats:
        row = chat_row(messages, tokenizer, answers_only=spec.loss_on == "answers", where=where)
        if len(row["input_ids"]) > spec.block_size:
            cut += 1
            row = {key: ids[: spec.block_size] for key, ids in row.items()}
        if any(label != IGNORED for label in row["labels"][1:]):
            rows.append(row)
        else:
            empty += 1
    if cut:
        notes.append(f"{cut} of {len(chats)} chats were cut to {spec.block_size} tokens (data.block_size).")
    if empty:
        notes.append(f"{empty} of {len(chats)} chats have no answer within those tokens and were left out.")
    return rows


def chat_row(messages: list[dict[str, str]], tokenizer: Any, answers_only: bool, where: str = "") -> Row:
    """One chat as token ids, and as labels only what the assistant itself has to say.

    What is trained is found by tokenising: the chat up to and with an answer, against the chat before it with the
    generation prompt. The difference is the answer, its end token, and what the template writes after that (a
    newline in ChatML), which the model never has to produce and which is left out.

    Raises:
        RecipeError: the template rewrites earlier turns, so that an answer cannot be told from its prompt.
    """
    ids = _render(messages, tokenizer, where)
    if not answers_only:
        return {"input_ids": ids, "labels": list(ids)}
    labels = [IGNORED] * len(ids)
    special = set(tokenizer.all_special_ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _render(messages[:turn], tokenizer, where, add_generation_prompt=True)
        upto = _render(messages[: turn + 1], tokenizer, where)
        if ids[: len(prompt)] != prompt or ids[: len(upto)] != upto:
            cause = f"the chat template rewrites earlier turns or joins a prompt's last token to answer {turn}"
            remedy = "Use loss_on: all, or an answer without leading white space"
            raise RecipeError(f"{where}: {cause}, so the loss cannot be put on answers alone. {remedy}.")
        stop = len(upto)
        while stop > len(prompt) and ids[stop - 1] not in special:
            stop -= 1
        # A template without an end token: then the answer is all that was added.
        stop = stop if stop > len(prompt) else len(upto)
        labels[len(prompt) : stop] = ids[len(prompt) : stop]
    return {"input_ids": ids, "labels": labels}


def _render(
    messages: list[dict[str, str]], tokenizer: Any, where: str, add_generation_prompt: bool = False
) -> list[int]:
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except Exception as error:  # jinja2's, or what the template's own raise_exception gives
        raise RecipeError(f"{where}: the chat template refuses this chat: {error}. Change its turns.") from error
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


class Collator:
    """Rows to a batch: int64 tensors [rows, longest], padded on the right; padding is masked and not trained on."""

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        import torch

        longest = max(len(row["input_ids"]) for row in rows)
        padding = [longest - len(row["input_ids"]) for row in rows]
        ids = [row["input_ids"] + [self.pad_token_id] * pad for row, pad in zip(rows, padding)]
        labels = [row["labels"] + [IGNORED] * pad for row, pad in zip(rows, padding)]
        mask = [[1] * (longest - pad) + [0] * pad for pad in padding]
        return {
            "input_ids": torch.tensor(ids),
            "labels": torch.tensor(labels),
            "attention_mask": torch.tensor(mask),
        }

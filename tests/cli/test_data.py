"""From files to rows: cutting into blocks, and the loss on exactly the answers and their end tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_offload import data, models, recipe
from hf_offload.errors import RecipeError

# SmolLM2-Instruct's template: a system turn of its own where the chat has none.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
LAST_ONLY = (
    "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}{{ m['role'] + ':' + m['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
CHAT = [
    {"role": "user", "content": "Hi <b>"},
    {"role": "assistant", "content": "Hello, you.\nSecond line ü"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long."},
]


@pytest.fixture
def tokenizer():  # type: ignore[no-untyped-def]
    return models.byte_level_tokenizer()


def trained(row: data.Row, tokenizer) -> str:  # type: ignore[no-untyped-def]
    return tokenizer.decode([label for label in row["labels"] if label != data.IGNORED])


@pytest.mark.parametrize("template", [None, SMOLLM2])
def test_exactly_the_answers_and_their_end_tokens_are_trained(tokenizer, template: str | None) -> None:  # type: ignore[no-untyped-def]
    tokenizer.chat_template = template or tokenizer.chat_template
    row = data.chat_row(CHAT, tokenizer, answers_only=True)
    assert tokenizer.decode(row["input_ids"]) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert trained(row, tokenizer) == "Hello, you.\nSecond line ü<|im_end|>So long.<|im_end|>"
    assert all(label in (data.IGNORED, token) for token, label in zip(row["input_ids"], row["labels"]))


def test_the_loss_on_all_trains_every_token(tokenizer) -> None:  # type: ignore[no-untyped-def]
    row = data.chat_row(CHAT, tokenizer, answers_only=False)
    assert row["labels"] == row["input_ids"]


def test_a_template_without_an_end_token_trains_the_whole_answer(tokenizer) -> None:  # type: ignore[no-untyped-def]
    tokenizer.chat_template = NO_END
    assert trained(data.chat_row(CHAT, tokenizer, True), tokenizer) == "Hello, you.\nSecond line ü\nSo long.\n"


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer) -> None:  # type: ignore[no-untyped-def]
    tokenizer.chat_template = LAST_ONLY
    with pytest.raises(RecipeError, match=r"here:3: the chat template rewrites earlier turns"):
        data.chat_row(CHAT, tokenizer, True, where="here:3")


def test_a_template_that_refuses_a_chat_is_told_with_its_line(tokenizer) -> None:  # type: ignore[no-untyped-def]
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(RecipeError, match=r"here:3: the chat template refuses this chat: no system role"):
        data.chat_row(CHAT, tokenizer, True, where="here:3")


def chats_file(tmp_path: Path, *lines: str) -> recipe.JsonlChat:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return recipe.JsonlChat(kind="jsonl", path=str(path), block_size=64)


def test_long_chats_are_cut_and_those_without_an_answer_left_out(tokenizer, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    long_answer = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * 100}]
    long_question = [{"role": "user", "content": "x" * 100}, {"role": "assistant", "content": "y"}]
    spec = chats_file(tmp_path, *(json.dumps({"messages": chat}) for chat in (long_answer, long_question)))
    rows = data.build(spec, tokenizer, seed=0)
    assert [len(row["input_ids"]) for row in rows.train] == [64]
    assert [note.split(" chats")[0] for note in rows.notes] == ["2 of 2", "1 of 2"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", ":2: not JSON"),
        ("[]", ":2: has no list `messages`"),
        ('{"messages": []}', ":2: has no list `messages`"),
        ('{"messages": [{"role": "user"}]}', ":2: the message {'role': 'user'} has no text"),
        ('{"messages": [{"role": "user", "content": 3}]}', ":2: the message"),
    ],
)
def test_a_bad_line_is_told_with_its_number(tokenizer, tmp_path: Path, line: str, said: str) -> None:  # type: ignore[no-untyped-def]
    spec = chats_file(tmp_path, json.dumps({"messages": CHAT}), line)
    with pytest.raises(RecipeError) as caught:
        data.build(spec, tokenizer, seed=0)
    assert said in str(caught.value)


def test_a_tokenizer_without_a_template_is_refused(tokenizer, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    tokenizer.chat_template = None
    with pytest.raises(RecipeError, match="no chat template"):
        data.build(chats_file(tmp_path, json.dumps({"messages": CHAT})), tokenizer, seed=0)


def test_texts_become_one_stream_cut_into_equal_rows(tokenizer) -> None:  # type: ignore[no-untyped-def]
    rows = data.blocks(["abcde", "fg"], tokenizer, 3)
    assert [tokenizer.decode(row["input_ids"]) for row in rows] == ["abc", "de<|endoftext|>", "fg<|endoftext|>"]
    assert all(row["labels"] == row["input_ids"] for row in rows)


def test_text_from_a_file_a_folder_and_from_python_itself(tokenizer, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.txt").write_text("b" * 20, encoding="utf-8")
    (tmp_path / "a.txt").write_text("a" * 20, encoding="utf-8")
    (tmp_path / "c.md").write_text("c" * 20, encoding="utf-8")

    def first_letters(**spec: object) -> set[int]:
        given = recipe.TextFiles(kind="text", block_size=8, **spec)  # type: ignore[arg-type]
        rows = data.build(given, tokenizer, seed=0).train
        return {row["input_ids"][0] for row in rows}

    folder = first_letters(path=str(tmp_path))
    assert len(folder) == 2
    assert first_letters(path=str(tmp_path / "a.txt")) < folder
    assert first_letters(path=str(tmp_path), pattern="*.md").isdisjoint(folder)
    rows = data.build(recipe.PydocTopics(kind="pydoc_topics", block_size=128), tokenizer, seed=0).train
    assert len(rows) > 2000
    assert "assert" in tokenizer.decode(rows[0]["input_ids"])


@pytest.mark.parametrize(("path", "pattern"), [("nowhere", "*.txt"), ("", "*.nothing")])
def test_text_that_is_not_there_is_refused(tokenizer, tmp_path: Path, path: str, pattern: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RecipeError, match=r"data\.path"):
        data.build(recipe.TextFiles(kind="text", path=str(tmp_path / path), pattern=pattern), tokenizer, seed=0)


def test_too_little_text_for_one_row_is_refused(tokenizer, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "a.txt").write_text("short", encoding="utf-8")
    with pytest.raises(RecipeError, match=r"data\.block_size=512: the data gives no row"):
        data.build(recipe.TextFiles(kind="text", path=str(tmp_path)), tokenizer, seed=0)


def test_the_evaluation_part_is_apart_and_follows_the_seed(tokenizer) -> None:  # type: ignore[no-untyped-def]
    spec = recipe.PydocTopics(kind="pydoc_topics", block_size=256, eval_fraction=0.1)
    one, again, other = (data.build(spec, tokenizer, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one.evaluation != other.evaluation
    assert len(one.evaluation) == round(0.1 * (len(one.train) + len(one.evaluation)))


def test_the_collator_pads_masks_and_ignores() -> None:
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [8]}]
    batch = {key: tensor.tolist() for key, tensor in data.Collator(pad_token_id=1)(rows).items()}
    assert batch == {
        "input_ids": [[5, 6, 7], [8, 1, 1]],
        "labels": [[-100, 6, 7], [8, -100, -100]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
    }


@pytest.mark.parametrize("text", ["", "plain", "tabs\tand\r\nlines", "ü ñ 漢字 🎉", "<|im_end|> and <|pad|>", " lead"])
def test_the_byte_level_tokenizer_gives_every_text_back(tokenizer, text: str) -> None:  # type: ignore[no-untyped-def]
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < 260 for i in ids)
    assert len(tokenizer) == 260


def test_the_byte_level_tokenizer_survives_saving(tokenizer, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again("Ünder test<|im_end|>")["input_ids"] == tokenizer("Ünder test<|im_end|>")["input_ids"]
    assert again.apply_chat_template(CHAT, tokenize=False) == tokenizer.apply_chat_template(CHAT, tokenize=False)

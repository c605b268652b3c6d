"""Examples with answers: which tokens are prompt, which are learnt, and where they end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from common.errors import ConfigError
from trainer_svc.demo.tiny import byte_tokenizer
from trainer_svc.megatron.protocol import Sample
from trainer_svc.rl.prompts import PromptEncoder
from trainer_svc.rl.supervised import AnswerEncoder, read_samples

CHAT_ML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""As many templates: the end token, then a newline that no policy samples."""

EOS, SYSTEM, USER, ASSISTANT = 258, 259, 260, 261


def model_dir(
    path: Path, *, template: str | None = None, config: dict[str, Any] | None = None
) -> Path:
    tokenizer = byte_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    if config is not None:
        (path / "generation_config.json").write_text(json.dumps(config))
    return path


def encode(path: Path, example: dict[str, Any]) -> Sample:
    return AnswerEncoder(path).sample(example, where="here")


def turns(*contents: str) -> list[dict[str, str]]:
    roles = ["user", "assistant"] * len(contents)
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


def test_the_last_message_is_learnt_to_its_end_token(tmp_path: Path) -> None:
    found = encode(model_dir(tmp_path), {"messages": turns("hi", "yo")})
    assert found == Sample(
        prompt_ids=(USER, *b"hi", EOS, ASSISTANT),
        completion_ids=(*b"yo", EOS),
        rollout_logprobs=(0.0, 0.0, 0.0),
        advantage=1.0,
    )


def test_what_a_template_puts_after_the_end_token_is_not_learnt(tmp_path: Path) -> None:
    found = encode(model_dir(tmp_path, template=CHAT_ML), {"messages": turns("a", "b", "c", "d")})
    assert found.prompt_ids == (
        *(USER, *b"a", EOS, *b"\n", ASSISTANT, *b"b", EOS, *b"\n"),
        *(USER, *b"c", EOS, *b"\n", ASSISTANT),
    )
    assert found.completion_ids == (*b"d", EOS)


def test_a_prompt_is_what_the_loop_makes_of_it(tmp_path: Path) -> None:
    path = model_dir(tmp_path, template=CHAT_ML)
    messages = [{"role": "system", "content": "s"}, *turns("hi", "yo")]
    prompts = PromptEncoder(path)
    found = encode(path, {"messages": messages, "answer": "beside"})
    assert list(found.prompt_ids) == prompts.encode({"messages": messages[:-1]})
    found = encode(path, {"prompt": "2+2=", "completion": "4"})
    assert list(found.prompt_ids) == prompts.encode({"prompt": "2+2="})


def test_a_text_gets_the_end_token_once(tmp_path: Path) -> None:
    path = model_dir(tmp_path)
    for completion in ("4", "4<|eos|>", "4<|eos|>\n"):
        found = encode(path, {"prompt": "2+2=", "completion": completion})
        assert found.prompt_ids == tuple(b"2+2=")
        assert found.completion_ids == (*b"4", EOS)


def test_an_end_token_of_the_generation_config_ends_an_answer(tmp_path: Path) -> None:
    """Some models end a turn with another token than the tokenizer's end of text."""
    template = CHAT_ML.replace("<|eos|>", "<|unused_0|>")
    path = model_dir(tmp_path, template=template, config={"eos_token_id": [EOS, 262]})
    assert encode(path, {"messages": turns("hi", "yo")}).completion_ids == (*b"yo", 262)
    assert encode(path, {"prompt": "a", "completion": "b"}).completion_ids == (*b"b", EOS)


def merging_tokenizer(path: Path) -> Path:
    """Tokens a, b, c, ab, bc and the end: "ab" after "a" would merge over the boundary."""
    from tokenizers import Tokenizer, models

    vocab = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "</s>": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("b", "c")]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(path)
    return path


def test_no_token_reaches_from_the_prompt_into_the_answer(tmp_path: Path) -> None:
    """A rollout's prompt ends where the prompt ends, so the policy never sees the merged token."""
    path = merging_tokenizer(tmp_path)
    found = encode(path, {"prompt": "ca", "completion": "bc"})
    assert (found.prompt_ids, found.completion_ids) == ((2, 0), (4, 5))
    found = encode(path, {"prompt": "ab", "completion": "ab"})
    assert (found.prompt_ids, found.completion_ids) == ((3,), (3, 5))


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"text": "a"}, r"found the keys \['text'\]; give `messages`, or `prompt` and"),
        ({"prompt": "a"}, r"found the keys \['prompt'\]; give `messages`"),
        ({"prompt": "", "completion": "b"}, "prompt: found ''; give some text"),
        ({"prompt": "a", "completion": 4}, "completion: found 4; give some text"),
        (
            {"prompt": "a", "completion": "b<|eos|>c"},
            r"completion: the answer goes on after its end token '<\|eos\|>': 'c'",
        ),
        ({"messages": "hi"}, "messages: give a list of at least a user's"),
        ({"messages": turns("hi")}, "messages: give a list of at least a user's"),
        ({"messages": turns("a", "b", "c")}, "messages: the last is of 'user'; end with the"),
        ({"messages": [*turns("a"), {"role": "assistant"}]}, r"messages\.1: give an object with"),
        (
            {"messages": [*turns("a"), {"role": "assistant", "content": None}]},
            r"messages\.1\.content: found None; give some text",
        ),
        (
            {"messages": [{"role": 3, "content": "a"}, {"role": "assistant", "content": "b"}]},
            r"messages\.0\.role: found 3; give some text",
        ),
        ({"messages": turns("a", "")}, r"messages\.1\.content: found ''; give some text"),
    ],
)
def test_a_bad_example_names_file_line_and_field(
    tmp_path: Path, example: dict[str, Any], message: str
) -> None:
    path = model_dir(tmp_path / "model")
    file = tmp_path / "sft.jsonl"
    file.write_text(json.dumps({"prompt": "a", "completion": "b"}) + f"\n\n{json.dumps(example)}")
    with pytest.raises(ConfigError, match=rf"^sft\.data: .*sft\.jsonl:3: {message}"):
        read_samples(file, model_dir=path)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages|length }}{{ messages[-1]['content'] }}", "does not continue the prompt"),
        ("{{ raise_exception('roles must alternate') }}", "refuses them: roles must alternate"),
    ],
)
def test_a_template_that_cannot_serve_is_named(tmp_path: Path, template: str, message: str) -> None:
    path = model_dir(tmp_path, template=template)
    with pytest.raises(ConfigError, match=f"here: messages: the model's chat template {message}"):
        encode(path, {"messages": turns("hi", "yo")})


def test_a_model_without_an_end_token_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="names no eos_token_id"):
        AnswerEncoder(tmp_path)


def test_samples_come_in_the_files_order(tmp_path: Path) -> None:
    file = tmp_path / "sft.jsonl"
    file.write_text("".join(f'{{"prompt": "p", "completion": "{n}"}}\n' for n in range(3)))
    found = read_samples(file, model_dir=model_dir(tmp_path / "model"))
    assert [bytes(sample.completion_ids[:-1]) for sample in found] == [b"0", b"1", b"2"]

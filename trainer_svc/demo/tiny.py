"""A tiny random Llama with a byte-level tokenizer, for `refit demo --fast` and for tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trainer_svc.demo.finished_dir import filling, is_model

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedTokenizerFast

VOCAB_SIZE = 320
PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
# A token for each role, and names for the rest, so that every id of the model can be decoded.
_ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]
_NUM_UNUSED = VOCAB_SIZE - 256 - 3 - len(_ROLES)
SPECIAL_TOKENS = [PAD, BOS, EOS, *_ROLES, *(f"<|unused_{i}|>" for i in range(_NUM_UNUSED))]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def prepare(
    out: Path,
    *,
    seed: int = 0,
    num_layers: int = 2,
    dtype: Literal["bfloat16", "float32"] = "float32",
) -> Path:
    """Make `out` a Hugging Face directory of a random model; no-op when it is a model.

    Hidden size 128, 4 heads of 32 (the least that vLLM's attention takes on a CPU) over 2
    key-value heads, vocabulary 320: id 0 to 255 are bytes, the others special tokens. Everything
    follows from `seed`. In bfloat16 vLLM's CPU worker ends with SIGILL at this head size.

    Raises:
        ConfigError: `out` is something else already.
    """
    if is_model(out):
        return out
    with filling(out) as work:
        tokenizer = byte_tokenizer()
        tokenizer.save_pretrained(work)
        _save_model(work, _config(num_layers, dtype, tokenizer), seed=seed)
    return out


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte of UTF-8 (its id is the byte's value), and the special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def _byte_symbols() -> list[str]:
    """The printable character by which byte-level tokenizers write each byte, in order of bytes.

    Printable Latin-1 characters stand for themselves, the other bytes take the ones from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _config(num_layers: int, dtype: str, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        # Wide enough that an adapter can move the logits far in a few steps.
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=dtype,
    )


def _save_model(out: Path, config: LlamaConfig, *, seed: int) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, GenerationConfig

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(out)
    GenerationConfig.from_model_config(config).save_pretrained(out)

"""Small tokenizers for tests: byte-level BPE as GPT-2's, and one that falls back to bytes as Llama 2's."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from cbjax.text import HFTokenizer
from cbjax.text.tokenizer import BYTE_TOKENS, surround

CORPUS = ["the cat sat on the mat, the dog sat on the log", "héllo wörld 日本 🎉 12 345"] * 4
SPECIALS = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level_backend(*, adds_bos: bool = True) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    if adds_bos:
        surround(backend, bos="<s>", eos=None)
    return backend


def byte_level_tokenizer(*, adds_bos: bool = True) -> HFTokenizer:
    return HFTokenizer(
        byte_level_backend(adds_bos=adds_bos),
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        chat_template=TEMPLATE,
    )


def byte_id(tokenizer: HFTokenizer, byte: int) -> int:
    """The id of the token for one byte, of either kind of tokenizer."""
    if tokenizer.byte_token_ids:
        token = BYTE_TOKENS[byte]
    else:
        # GPT-2's alphabet: printable bytes stand for themselves, the others for the code points from 256 on.
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [other for other in range(256) if other not in printable]
        token = chr(byte) if byte in printable else chr(256 + others.index(byte))
    id = tokenizer.backend.token_to_id(token)
    assert id is not None
    return id


def byte_fallback_tokenizer() -> HFTokenizer:
    """Pieces with a visible space; a character without a piece becomes byte tokens. Decoding drops one space."""
    pieces = ["<unk>", *SPECIALS, *BYTE_TOKENS, "▁", *"abcdehlot", "▁a", "▁b", "he", "▁he", "é"]
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "b"), ("h", "e"), ("▁", "he")]
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return HFTokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})

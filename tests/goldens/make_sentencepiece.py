"""Makes `sentencepiece.json`: a tiny SentencePiece BPE vocabulary, and texts encoded by `sentencepiece`.

    python make_sentencepiece.py --out sentencepiece.json

`vocabularies` has two records, with and without a space put before the text. Each has `metadata`, the keys
that llama.cpp's converter would write into a GGUF file, and `cases`: a text, its ids (no BOS) and what they
decode to. Needs only the package sentencepiece (0.2).
"""

import argparse
import io
import json
from pathlib import Path

import sentencepiece

CORPUS = [
    "the cat sat on the mat and the dog sat on the log",
    "a lighthouse on the northern cape was built by stonemasons",
    "every stone was cut inland, numbered, and carried to the shore",
    "def add(a, b):\n    return a + b",
    "she sells sea shells on the sea shore, 12 shells for 34 pence",
    "grüße aus der grünen stadt, über die brücke",
]
TEXTS = [
    "the cat",
    " the  cat ",
    "stones on the shore",
    "aaaa aaaaa ssss",
    "return 1234 + 56",
    "tab\tand\nnewline\n\n  indent",
    "grüße, été, naïve",
    "emoji 🎉🚀 and 日本語",
    "unseen: ZQX, mark: <|sep|>",
    "▁visible space",
]


def train(add_dummy_prefix: bool) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        add_dummy_prefix=add_dummy_prefix,
        user_defined_symbols=["<|sep|>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def token_type(processor: sentencepiece.SentencePieceProcessor, id: int) -> int:
    """GGUF's number for the kind of a token."""
    if processor.is_unknown(id):
        return 2
    if processor.is_control(id):
        return 3
    if processor.id_to_piece(id) == "<|sep|>":
        return 4
    return 6 if processor.is_byte(id) else 1


def record(add_dummy_prefix: bool) -> dict:
    processor = train(add_dummy_prefix)
    ids = range(processor.get_piece_size())
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(id) for id in ids],
        "tokenizer.ggml.scores": [processor.get_score(id) for id in ids],
        "tokenizer.ggml.token_type": [token_type(processor, id) for id in ids],
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
        "tokenizer.ggml.add_space_prefix": add_dummy_prefix,
    }
    encoded = [(text, processor.encode(text)) for text in TEXTS]
    cases = [{"text": text, "ids": ids, "decoded": processor.decode(ids)} for text, ids in encoded]
    return {"metadata": metadata, "cases": cases}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make sentencepiece.json with sentencepiece.")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    args = parser.parse_args()
    lines = [json.dumps(record(flag), ensure_ascii=False, separators=(",", ":")) for flag in (True, False)]
    body = ",\n".join(lines)
    version = json.dumps(sentencepiece.__version__)
    args.out.write_text(f'{{\n"sentencepiece":{version},\n"vocabularies": [\n{body}\n]\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()

"""Tokenizers, chat templates and incremental detokenisation."""

from cbjax.text.adapters import as_tokenizer as as_tokenizer
from cbjax.text.chat import render_chat as render_chat
from cbjax.text.detokenizer import Detokenizer as Detokenizer
from cbjax.text.folder import tokenizer_from_folder as tokenizer_from_folder
from cbjax.text.gguf_tokenizer import tokenizer_from_gguf as tokenizer_from_gguf
from cbjax.text.tokenizer import ByteFallback as ByteFallback
from cbjax.text.tokenizer import HFTokenizer as HFTokenizer
from cbjax.text.tokenizer import Tokenizer as Tokenizer

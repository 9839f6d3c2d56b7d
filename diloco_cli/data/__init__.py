"""What a region reads: files in, batches of tokens out. Start with protocol.py.

    protocol.py  what a tokenizer and a dataset are, and the registries of all kinds
    heldout.py   which text is held out, file by file
    first_bytes.py  is a file text? Its first bytes say what it is
    hf_tokenizer.py  tokenizers of the `tokenizers` library
    patterns.py  which files a path or a pattern of a spec means
    text.py      text from files: the byte tokenizer, text by pattern, Python's own library
    sources.py   documents out of files: text, JSON lines, Parquet, Arrow
    prepare.py   text becomes a folder of tokens
    token_folder.py  that folder: shards of tokens, ends of documents, a manifest of digests
    foreign_tokens.py  token files of nanoGPT, llm.c and Megatron
    tokens.py    tokens that were prepared before the run, mixed by weight
    small_corpora.py  JSON lines and Parquet, tokenized at the first start
    own_loader.py  a lab's own loader: rows of tokens by number
    order.py     the order in which a corpus is read; any region can go on where another stopped

Importing this package registers every kind.
"""

from diloco_cli.data import hf_tokenizer, own_loader, small_corpora, text, tokens
from diloco_cli.data.heldout import HeldoutText, NamesHeldout
from diloco_cli.data.order import Corpus, ReadingOrder, Stream, next_windows, shuffled
from diloco_cli.data.protocol import (
    Dataset,
    LooksAhead,
    NamesTokenizer,
    Tokenizer,
    datasets,
    tokenizers,
)

__all__ = [
    "Corpus",
    "Dataset",
    "HeldoutText",
    "LooksAhead",
    "NamesHeldout",
    "NamesTokenizer",
    "ReadingOrder",
    "Stream",
    "Tokenizer",
    "datasets",
    "hf_tokenizer",
    "next_windows",
    "own_loader",
    "shuffled",
    "small_corpora",
    "text",
    "tokenizers",
    "tokens",
]

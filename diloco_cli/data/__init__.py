"""What a region reads: files in, batches of tokens out. Start with protocol.py.

    protocol.py  what a tokenizer and a dataset are, and the registries of all kinds
    text.py      text from files: the byte tokenizer, text by pattern, Python's own library
    order.py     the order in which a region reads its text; it survives a restart

Importing this package registers every kind.
"""

from diloco_cli.data import text
from diloco_cli.data.order import Corpus, Cursor, Share, Stream, place_of, shuffled
from diloco_cli.data.protocol import Dataset, Tokenizer, datasets, tokenizers

__all__ = [
    "Corpus",
    "Cursor",
    "Dataset",
    "Share",
    "Stream",
    "Tokenizer",
    "datasets",
    "place_of",
    "shuffled",
    "text",
    "tokenizers",
]

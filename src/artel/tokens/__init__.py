"""Tokenizers, the token store, the order of blocks, batches. Knows no model."""

from artel.tokens.batches import Rows, micro_batches, step_numbers
from artel.tokens.blocks import Blocks
from artel.tokens.order import Order
from artel.tokens.store import StorePart, StoreWriter, TokenStore
from artel.tokens.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

__all__ = [
    "Blocks",
    "Order",
    "Rows",
    "StorePart",
    "StoreWriter",
    "TokenStore",
    "Tokenizer",
    "load_tokenizer",
    "micro_batches",
    "step_numbers",
    "train_tokenizer",
]

"""Tokenizers, the token store, the order of samples, batches. Knows no model."""

from artel.tokens.sampling.batches import Rows, Samples, micro_batches, one_row, rows_to_judge, step_numbers
from artel.tokens.sampling.blocks import TokenBlocks, WholeSamples
from artel.tokens.sampling.order import BalancedOrder, Order
from artel.tokens.store.shards import StoreWriter
from artel.tokens.store.store import DamagedStore, Sample, StorePart, TokenStore
from artel.tokens.tokenizer.tokenizer import Encoded, Frame, Tokenizer, load_tokenizer
from artel.tokens.tokenizer.train import train_tokenizer

__all__ = [
    "BalancedOrder",
    "DamagedStore",
    "Encoded",
    "Frame",
    "Order",
    "Rows",
    "Sample",
    "Samples",
    "StorePart",
    "StoreWriter",
    "TokenBlocks",
    "TokenStore",
    "Tokenizer",
    "WholeSamples",
    "load_tokenizer",
    "micro_batches",
    "one_row",
    "rows_to_judge",
    "step_numbers",
    "train_tokenizer",
]

"""Tokenizers, the token store, the order of samples, batches. This package does not depend on models."""

from artel.tokens.batches import (
    Rows,
    SampleList,
    Samples,
    evaluation_rows,
    micro_batches,
    single_row,
    step_positions,
    training_rows,
)
from artel.tokens.order import BalancedOrder, Order
from artel.tokens.packing import PackedSamples, TokenBlocks, UnpackedSamples
from artel.tokens.store import DamagedStore, Sample, StoreSplit, StoreWriter, TokenStore
from artel.tokens.tokenizer.loading import load_tokenizer
from artel.tokens.tokenizer.tokenizer import Encoding, Frame, Tokenizer
from artel.tokens.tokenizer.train import train_tokenizer

__all__ = [
    "BalancedOrder",
    "DamagedStore",
    "Encoding",
    "Frame",
    "Order",
    "PackedSamples",
    "Rows",
    "Sample",
    "SampleList",
    "Samples",
    "StoreSplit",
    "StoreWriter",
    "TokenBlocks",
    "TokenStore",
    "Tokenizer",
    "UnpackedSamples",
    "evaluation_rows",
    "load_tokenizer",
    "micro_batches",
    "single_row",
    "step_positions",
    "train_tokenizer",
    "training_rows",
]

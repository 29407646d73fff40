"""A teacher beside the model that is trained: loaded, asked before training, its outputs kept."""

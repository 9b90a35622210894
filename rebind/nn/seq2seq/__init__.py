"""nn/seq2seq."""

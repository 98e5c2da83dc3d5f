"""Text to tokens and back: chat templates, tokenizer, incremental detokenizer, stop strings.

May import kvrelay.
"""

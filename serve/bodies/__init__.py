"""What request bodies are made of: messages, tools, the spellings of structured output, and fields that are not known.

May import kvrelay.
"""

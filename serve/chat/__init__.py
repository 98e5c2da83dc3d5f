"""What a chat model's text holds: reasoning and tool calls, by families of models, split from the content as it comes.

May import kvrelay, serve/text.
"""

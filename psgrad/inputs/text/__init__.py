"""Texts as tokens: tokenizers, chats, rows of tokens kept in a cache."""

"""Converts prompts and chats to token ids, and token ids to text with stop strings."""

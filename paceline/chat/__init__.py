"""Conversations: the bodies of OpenAI's chat API, and the one form of messages that a chat template gets."""

"""Attention of a decoder's steps over one memory, and their gradients together."""

from attnfast.decoding.memory import Memory, attend, attend_with_history, check_memory, prepare

__all__ = ["Memory", "attend", "attend_with_history", "check_memory", "prepare"]

"""Locks between processes, under the name by which the adapters know them."""

from speculators_core.locks import file_lock

__all__ = ["file_lock"]

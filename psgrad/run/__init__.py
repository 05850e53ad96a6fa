"""Run folders, shards, the ledger of a private run, and atomic writes to the disk. No torch."""

from psgrad.run.folders import RunFolder

__all__ = ["RunFolder"]

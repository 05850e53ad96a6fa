"""Run folders, shards, the ledger of a private run, and atomic writes to the disk. No torch."""

from psgrad.storage.folders import RunFolder
from psgrad.storage.ledger import Ledger
from psgrad.storage.ledger_lines import LedgerContent
from psgrad.storage.private_runs import PrivateRunFolder

__all__ = ["Ledger", "LedgerContent", "PrivateRunFolder", "RunFolder"]

"""Run folders, shards, the ledger of a private run, and atomic writes to the disk. No torch."""

from psgrad.run.folders import RunFolder
from psgrad.run.ledger import Ledger
from psgrad.run.ledger_lines import LedgerContent
from psgrad.run.private_runs import PrivateRunFolder

__all__ = ["Ledger", "LedgerContent", "PrivateRunFolder", "RunFolder"]

"""What stays on the disk: run folders, the ledger of a private run, and writes that a crash can't tear. No torch."""

from psgrad.storage.folders import RunFolder
from psgrad.storage.ledger import Ledger
from psgrad.storage.ledger_lines import LedgerContent, require_same
from psgrad.storage.private_runs import PrivateRunFolder

__all__ = ["Ledger", "LedgerContent", "PrivateRunFolder", "RunFolder", "require_same"]

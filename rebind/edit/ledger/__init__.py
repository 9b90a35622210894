"""edit/ledger."""

"""edit/facts."""

"""edit/export."""

"""edit/targets."""

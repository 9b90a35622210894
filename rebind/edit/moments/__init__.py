"""edit/moments."""

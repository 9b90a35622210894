"""Translation by the kind of attention."""

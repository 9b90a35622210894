"""How fast things are here, beside others' ways of doing them: what `rebind bench` runs."""

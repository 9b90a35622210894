"""cli/ui."""

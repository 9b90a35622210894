"""edit/solve."""

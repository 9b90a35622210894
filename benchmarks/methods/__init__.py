"""What every editing method makes of facts, few and many, at once and batch after batch."""

"""What each speed-up of editing buys."""

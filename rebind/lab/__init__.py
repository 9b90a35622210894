"""Experiments: what a memory holds, what it forgets and what that costs, measured and drawn. One file each."""

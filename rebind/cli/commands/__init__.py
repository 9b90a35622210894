"""One module per command of `rebind`. None of them imports torch before the command runs."""

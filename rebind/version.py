"""Which rebind this is: the one place that says so."""

__version__ = "0.1.0"

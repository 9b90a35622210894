"""Many writes, fast: one scan over sequences for every fast rule, and what goes before it."""

from rebind.ops.convolve import short_convolution
from rebind.ops.dispatch import Explanation
from rebind.ops.scan import explain, scan, scan_rule
from rebind.ops.step import step

__all__ = ["Explanation", "explain", "scan", "scan_rule", "short_convolution", "step"]

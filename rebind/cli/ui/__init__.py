"""What the commands print.

terminal   standard output and standard error; text for people, JSON for programs
errors     how a command fails: messages, JSON documents, exit codes
progress   progress bars, and lines in a log file
tables     tables and numbers
heatmap    heatmaps
"""

from rebind.cli.ui.progress import Phases
from rebind.cli.ui.terminal import Terminal

__all__ = ["Phases", "Terminal"]

"""What rebind raises and warns: every message says what was got, what was expected, what to do next."""


class RebindError(Exception):
    """Anything rebind refuses to do."""


class InputError(RebindError, ValueError):
    """An argument cannot be used as it is."""


class ShapeError(InputError):
    """Widths or sizes do not fit together."""


class UnknownNameError(InputError, LookupError):
    """A name that no rule, feature or method answers to."""


class NumericalError(RebindError, ArithmeticError):
    """The numbers admit no trustworthy answer."""


class StorageError(RebindError, OSError):
    """The disk would not take what was to be written; nothing half-written was left."""


class LedgerError(RebindError):
    """A ledger that cannot be trusted or cannot be had now; nothing was changed."""


class GuardError(RebindError):
    """An edit that did not pass a check and was not written; the model and the ledger are as they were."""

    def __init__(self, message: str, checks: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.checks = checks  # the names of those that failed, worst first


class NumericalWarning(UserWarning):
    """An answer was found, but only after a rescue; the message says which and how large."""


class FactWarning(UserWarning):
    """Facts can be written together, but not all of them as they ask."""


class LedgerWarning(UserWarning):
    """A ledger was read, but not all that its files hold; or it holds something of what is asked for already."""


class RecordingWarning(UserWarning):
    """Something could not be recorded as a CUDA graph: it runs without, slower; the message says what and why."""

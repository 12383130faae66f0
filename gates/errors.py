"""What can go wrong with a measurement itself."""


class InstrumentError(Exception):
    """The measurement failed, so nothing is known about the candidate: the verdict is `errored`.

    The message says what happened and what to do about it, in one or two sentences.
    """

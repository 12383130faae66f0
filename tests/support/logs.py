"""What a test's process logs of the service that runs in it."""

import contextlib
from collections.abc import Iterator

import structlog


def plain() -> None:
    """Log without colours: structlog's default for people draws each traceback with its locals, which takes seconds."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(),
        ]
    )


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Log nothing, while what a command says is read; then as before."""
    before = structlog.get_config()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    try:
        yield
    finally:
        structlog.configure(**before)

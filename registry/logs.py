"""Logs of every process: one JSON object a line on standard error. The process sets them up, never a library."""

import logging
import sys

import structlog


def configure() -> None:
    """Write one JSON object a line to standard error: our own events and the server's."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # One line a request would drown what a runner, which asks every two seconds, has to say.
    logging.getLogger("httpx").setLevel(logging.WARNING)

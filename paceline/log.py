"""Structured logs for operators, one line per event; never tokens, prompts or keys."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog
from structlog.typing import Processor

LogFormat = Literal["auto", "json", "console"]
Logger = structlog.stdlib.BoundLogger


def configure_logging(service: str, level: str, log_format: LogFormat) -> None:
    """Send all logs, those of libraries included, to standard error: as JSON, or as readable lines on a terminal."""
    console = sys.stderr.isatty() if log_format == "auto" else log_format == "console"
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console),
        lambda _, __, event: {"service": service, **event},
    ]
    renderer: Processor = (
        # Plain: the default prints local variables with tracebacks, which may include prompts and keys.
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
        if console
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        # First, so that a line below the level costs almost nothing.
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    errors: list[Processor] = [] if console else [structlog.processors.format_exc_info]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *errors, renderer],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def get_logger(name: str) -> Logger:
    """Return a logger; values bound with `structlog.contextvars` appear in each of its lines."""
    logger: Logger = structlog.stdlib.get_logger(name)
    return logger

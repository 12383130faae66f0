"""Loaded into a worker, `celery worker -I tests.support.standstill`: SIGRTMIN lets its main thread stand still."""

import signal
import threading

signal.signal(signal.SIGRTMIN, lambda _number, _frame: threading.Event().wait())

"""Where T5X is not installed, its helpers cannot be imported, not even for doctests."""

from perex_t5x import extras

collect_ignore = [] if extras.is_installed("t5x") else ["small_t5x.py"]

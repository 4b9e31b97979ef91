"""Gin files of T5X's become ours: `python -m perex_t5x.gin_port FILE`."""

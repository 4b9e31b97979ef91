"""`python -m perex_t5x train ...` is `perex train ...`."""

from perex_t5x.cli import dispatch

if __name__ == "__main__":
    dispatch.main()

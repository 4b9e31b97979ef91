"""The command `python -m perex_t5x.experiments.sweep`."""

from perex_t5x.experiments import sweep
from perex_t5x.experiments.sweep import command

if __name__ == "__main__":
    command.main(sweep.__doc__)

"""The command `python -m perex_t5x.experiments.sweep`."""

from perex_t5x import cli
from perex_t5x.experiments import sweep
from perex_t5x.experiments.sweep import command

if __name__ == "__main__":
    cli.run(command.main, sweep.__doc__, flags=command.define_flags)

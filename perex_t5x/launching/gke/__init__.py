"""JobSets on Google Kubernetes Engine."""


def main(argv: list[str] | None = None) -> None:
    """launch/gke.py; does not return."""
    from perex_t5x.launching.gke import command

    command.main(argv)

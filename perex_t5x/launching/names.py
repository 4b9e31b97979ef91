"""Names that clouds, clusters and shells all accept unchanged; anything else is refused, never rewritten."""

from __future__ import annotations

import hashlib
import re

from perex_t5x.errors import ConfigError

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_ZONE = re.compile(r"[a-z]+-[a-z]+[0-9]+-([a-z]|ai[0-9]+[a-z])")
_PROJECT = re.compile(r"([a-z0-9.-]+:)?[a-z][-a-z0-9]{4,28}[a-z0-9]")
_BUCKET = re.compile(r"gs://[a-z0-9][-a-z0-9_.]{1,220}[a-z0-9](/[\w.=+@:,~-]+)*/?", re.ASCII)


def check_name(name: str, flag: str = "--name") -> str:
    """The name itself, if both a cloud and a cluster accept it.

    >>> check_name("sqrt-lr-1")
    'sqrt-lr-1'
    """
    if _NAME.fullmatch(name):
        return name
    cleaned = suggestion(name)
    raise ConfigError(
        f"{flag}={name!r}: a name has at most 40 characters of a-z, 0-9 and -, begins with a letter and ends with a letter "
        f"or digit. Set {flag}" + (f", such as {flag}={cleaned}" if cleaned else "") + "."
    )


def suggestion(text: str) -> str:
    """The nearest valid name; '' if nothing is left.

    >>> suggestion("My run_1 $(x)"), suggestion("1")
    ('my-run-1-x', '')
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).lstrip("-0123456789")[:40].strip("-")


def label_value(text: str) -> str:
    """A label's value for Google Cloud and Kubernetes; a text that had to be changed ends with its fingerprint.

    >>> label_value("v5e-256"), label_value("gs://bucket/A")
    ('v5e-256', 'gs-bucket-a-88f2d6d1')
    """
    cleaned = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if cleaned == text and len(text) <= 63:
        return text
    return f"{cleaned[:54].strip('-')}-{fingerprint(text)}".lstrip("-")


def check_zone(zone: str) -> str:
    """
    >>> check_zone("us-west4-a"), check_zone("us-central1-ai1a")
    ('us-west4-a', 'us-central1-ai1a')
    """
    if _ZONE.fullmatch(zone):
        return zone
    raise ConfigError(f"--zone={zone!r} is not the name of a zone, such as --zone=us-west4-a.")


def check_project(project: str) -> str:
    """
    >>> check_project("my-project-1")
    'my-project-1'
    """
    if _PROJECT.fullmatch(project):
        return project
    raise ConfigError(
        f"--project={project!r} is not a project id, such as --project=my-project-1 (the id, not the title)."
    )


def check_bucket_path(path: str, flag: str = "--dir") -> str:
    """A folder in a bucket, without a trailing slash.

    >>> check_bucket_path("gs://bucket/sweeps/a/")
    'gs://bucket/sweeps/a'
    """
    if not _BUCKET.fullmatch(path) or ".." in path.split("/"):
        raise ConfigError(
            f"{flag}={path!r}: the hosts of a slice share nothing but a bucket. Write gs://BUCKET/FOLDER, with letters, "
            "digits and -_.=+@:,~ only."
        )
    return path.rstrip("/")


def bucket_of(path: str) -> str:
    """
    >>> bucket_of("gs://bucket/sweeps/a")
    'gs://bucket'
    """
    return "/".join(path.split("/")[:3])


def fingerprint(text: str) -> str:
    """Eight hexadecimal digits that stand for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]

"""Environment variables of the jobs: --env, --libtpu_args and --secret, checked here and set by the worker.

Values of --env are part of jobs.json, which is stored in the bucket or in a ConfigMap, and which a dry run prints. Of a
secret only its name is: the value is fetched where the job runs (Secret Manager on TPU VMs, a Kubernetes Secret on GKE) into
the environment of the worker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from absl import flags

from perex_t5x.errors import ConfigError

LIBTPU = "LIBTPU_INIT_ARGS"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# Whole words of a name: TOKENIZERS_PARALLELISM is none of them.
_LIKE_A_SECRET = re.compile(r"(^|_)(TOKEN|(API|ACCESS)?KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE)S?(_|$)", re.IGNORECASE)
# Set by the launch or the cloud so that hosts and slices find each other; libtpu's other settings stay free.
_RESERVED = (
    (r"PEREX_T5X_.*", "the launch sets it itself"),
    (r"PYTHONUNBUFFERED", "the launch sets it itself"),
    (r"JAX_(COORDINATOR_(ADDRESS|BIND_ADDRESS|PORT)|NUM_PROCESSES|PROCESS_ID)", "the hosts find each other by it"),
    (r"MEGASCALE_(NUM_SLICES|SLICE_ID|COORDINATOR_ADDRESS|PORT)", "the slices find each other by it"),
    (r"TPU_(?!(STDERR|MIN|MAX)_LOG|LOG_|VMODULE$|PREMAPPED_).*", "the hosts of a slice find each other by it"),
)
_REFERENCE = re.compile(r"[A-Za-z0-9_.:/-]{1,600}", re.ASCII)
# Values that people paste: known prefixes of tokens, and long numbers.
_LIKE_A_VALUE = re.compile(
    r"hf_\w{16,}|sk-[\w-]{16,}|gh[a-z]_\w{16,}|github_pat_.*|glpat-.*|xox[a-z]-.*|AIza[\w-]{20,}|ya29\..*|eyJ\w{10,}\..*"
    r"|[0-9a-fA-F]{32,}",
    re.ASCII,
)
_SHORTEST_HIDDEN = 8  # characters; a shorter value is no secret, and would be found everywhere


def define_environment_flags() -> None:
    flags.DEFINE_multi_string("env", [], "NAME=VALUE, an environment variable of the jobs, not for secrets")
    flags.DEFINE_multi_string(
        "libtpu_args", [], "Flags of libtpu and XLA's TPU compiler, such as --libtpu_args='--xla_a=1 --xla_b=2'; added to "
        "LIBTPU_INIT_ARGS of the jobs")  # fmt: skip
    flags.DEFINE_multi_string(
        "secret", [], "NAME=REFERENCE, an environment variable of the jobs whose value the hosts fetch. On TPU "
        "VMs a secret of Secret Manager: S, S:VERSION or projects/P/secrets/S/versions/V; on GKE SECRET/KEY")  # fmt: skip
    flags.DEFINE_list("not_secret", [], "Names of --env that look like those of secrets and are none.")


@dataclass(frozen=True)
class Environment:
    """
    Attributes:
      variables: name -> value; public.
      secrets: name -> reference to the value, which each launcher reads in its own way.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(
        cls,
        env: Sequence[str] = (),
        libtpu_args: Sequence[str] = (),
        secret: Sequence[str] = (),
        not_secret: Sequence[str] = (),
    ) -> Environment:
        """From the flags of these names; raises `ConfigError` for the first problem, without the value of a secret.

        >>> Environment.parse(["A=1=2"], ["--xla_a=1  --xla_b=2"], ["HF_TOKEN=hf-token:3"])
        Environment(variables={'A': '1=2', 'LIBTPU_INIT_ARGS': '--xla_a=1 --xla_b=2'}, secrets={'HF_TOKEN': 'hf-token:3'})
        """
        variables: dict[str, str] = {}
        for name, value in _pairs("--env", env):
            if name == LIBTPU:
                raise ConfigError(
                    f"--env {LIBTPU}=...: use --libtpu_args='--xla_...', which adds to what the host has."
                )
            if _LIKE_A_SECRET.search(name) and name not in not_secret:
                raise ConfigError(
                    f"--env {name}=...: looks like a secret, and values of --env are stored in the bucket and printed. Use "
                    f"--secret {name}=REFERENCE (docs/launch.md); if it is none, add --not_secret={name}."
                )
            if "\0" in value:
                raise ConfigError(f"--env {name}=...: the value contains a zero byte, which no environment can.")
            variables[name] = value
        words = " ".join(libtpu_args).split()
        for word in words:
            if not re.fullmatch(r"--\w[^=]*(=.*)?", word):
                raise ConfigError(
                    f"--libtpu_args: {word!r} is not a flag, such as --xla_tpu_use_enhanced_launch_barrier=true."
                )
        if words:
            variables[LIBTPU] = " ".join(words)
        secrets = dict(_pairs("--secret", secret))
        for name, reference in secrets.items():
            if name in variables or name == LIBTPU:
                other = "--libtpu_args" if name == LIBTPU else "--env"
                raise ConfigError(f"--secret {name}: {other} sets the same variable.")
            if not reference:
                raise ConfigError(f"--secret {name}=: the reference is missing: where the hosts find the value.")
            if _LIKE_A_VALUE.fullmatch(reference) or not _REFERENCE.fullmatch(reference):
                raise ConfigError(
                    f"--secret {name}=...: looks like the value of a secret, not like a reference to one. Store the value "
                    "in Secret Manager or a Kubernetes Secret, and give its name (docs/launch.md). If it was one, remove "
                    "it from this shell's history."
                )
        return cls(variables, secrets)


def _pairs(flag: str, given: Sequence[str]) -> Iterable[tuple[str, str]]:
    """The names and values of a repeated flag, names checked."""
    seen = set()
    for text in given:
        name, equals, value = text.partition("=")
        form = f"{flag} NAME={'REFERENCE' if flag == '--secret' else 'VALUE'}"
        if not equals:  # what is there may be the value of a secret: not shown
            shown = f"{flag} {name}" if flag == "--env" else f"a {flag}"
            raise ConfigError(f"{shown} has no equals sign. Write {form}.")
        if not _NAME.fullmatch(name):
            shown = repr(name) if flag == "--env" else "what is given"
            raise ConfigError(f"{flag}: {shown} is not the name of an environment variable. Write {form}.")
        for pattern, why in _RESERVED:
            if re.fullmatch(pattern, name):
                raise ConfigError(f"{flag} {name}=...: this variable is reserved, {why}.")
        if name in seen:
            raise ConfigError(f"{flag} {name}=... is given twice.")
        seen.add(name)
        yield name, value


# --- on the hosts -----------------------------------------------------------------------------------------------------


def of_job(variables: Mapping[str, str], host: Mapping[str, str]) -> dict[str, str]:
    """The environment of a job: the host's, then `variables`; flags of libtpu are added to the host's.

    >>> of_job({"A": "2", LIBTPU: "--b=1"}, {"A": "1", LIBTPU: "--a=1"})
    {'A': '2', 'LIBTPU_INIT_ARGS': '--a=1 --b=1'}
    """
    environment = {**host, **variables}
    if LIBTPU in variables and host.get(LIBTPU):
        environment[LIBTPU] = f"{host[LIBTPU]} {variables[LIBTPU]}"
    return environment


def check_secrets(names: Iterable[str], host: Mapping[str, str]) -> None:
    """Raises `ConfigError` for secrets that are not in the host's environment."""
    if missing := [name for name in names if not host.get(name)]:
        raise ConfigError(
            f"the value of --secret {', '.join(missing)} is not in the environment of this host: may its service account "
            "read the secret, and does the secret exist? See docs/launch.md."
        )


def redactor(names: Iterable[str], host: Mapping[str, str]) -> Callable[[bytes], bytes]:
    """A function that replaces the values of secrets in what is printed or stored.

    >>> redactor(["HF_TOKEN"], {"HF_TOKEN": "hf-123456"})(b"token=hf-123456!")
    b'token=[secret HF_TOKEN]!'
    """
    hidden: dict[bytes, bytes] = {}
    for name in names:
        value = host.get(name, "")
        for piece in (value, *value.splitlines()):  # logs are read line by line
            if len(piece.strip()) >= _SHORTEST_HIDDEN:
                hidden[piece.strip().encode(errors="surrogateescape")] = f"[secret {name}]".encode()
    if not hidden:
        return lambda text: text
    pattern = re.compile(b"|".join(re.escape(value) for value in sorted(hidden, key=len, reverse=True)))
    return lambda text: pattern.sub(lambda match: hidden[match[0]], text)

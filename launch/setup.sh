# Sourced by the other scripts: makes $root/.venv and installs the package into it under constraints.txt.
#
#   setup_venv EXTRAS      e.g. setup_venv train or setup_venv dev
#
# .venv/.ready holds a fingerprint of what was installed and is written last, so a half-made environment is noticed;
# one that no longer works is made again.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "ERROR: Python 3.11 or newer with venv is needed (on Debian: apt install python3.11-venv)." >&2
  echo "If it has another name, set PYTHON=/path/to/python." >&2
  return 1
}

fingerprint() {
  cat "$root/pyproject.toml" "$root/constraints.txt" | cksum | tr -d ' '
}

# True if the interpreter runs and every package the project imports is there.
venv_works() {
  "$venv/bin/python" - <<'PY' 2>/dev/null
import importlib.util, sys
names = "absl array_record flax gin grain jax jaxlib optax orbax.checkpoint perex_t5x rich seqio tensorboard tensorflow tensorflow_datasets tensorstore"
sys.exit(any(importlib.util.find_spec(name) is None for name in names.split()))
PY
}

setup_venv() {
  local extra=$1 ready=$venv/.ready wanted python
  wanted=$(fingerprint)
  if [ -f "$ready" ] && [ "$(head -n 1 "$ready")" = "$wanted" ] && grep -qx "extra:$extra" "$ready" && venv_works; then
    return
  fi
  if [ -d "$venv" ] && { [ ! -f "$ready" ] || ! venv_works; }; then
    echo "The environment in $venv is incomplete or broken: making it again."
    rm -rf "$venv"
  fi
  if [ ! -d "$venv" ]; then
    python=$(find_python) || return 1
    echo "Making a virtual environment in $venv with $("$python" --version) ..."
    "$python" -m venv "$venv" || { echo "ERROR: could not make $venv." >&2; return 1; }
  fi
  local extras=""
  [ -n "$extra" ] && extras="[$extra]"
  echo "Installing perex_t5x and what it needs (a few minutes the first time) ..."
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --progress-bar off \
    -c "$root/constraints.txt" -e "$root$extras" \
    || { echo "ERROR: installation failed; see above. Run the same command again to continue." >&2; return 1; }
  # Extras installed earlier still count, but not if what they mean has changed since.
  local earlier=""
  [ -f "$ready" ] && [ "$(head -n 1 "$ready")" = "$wanted" ] && earlier=$(tail -n +2 "$ready")
  { echo "$wanted"; printf '%s\n' "extra:train" "extra:$extra" $earlier | sort -u; } > "$ready.new"
  mv "$ready.new" "$ready"
}

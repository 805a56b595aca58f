# Sourced by test.sh and quickstart.sh: one environment for both, made once and reused.
#
#   LEANGRPO_VENV  its folder (default: the active environment, else .venv in the repository)
#   PYTHON         the interpreter that makes it (default: the first one that is new enough)

is_new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if is_new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  echo "leangrpo needs Python 3.11 or newer; tried: ${PYTHON:-python3 python3.13 python3.12 python3.11}." >&2
  echo "Install one, or name it: PYTHON=/path/to/python3.11 bash tools/$(basename "$0")" >&2
  return 1
}

# Sets VENV to an environment in which the checkout $1 is installed with its tested dependencies.
use_environment() {
  local root=$1 python wanted
  VENV=${LEANGRPO_VENV:-${VIRTUAL_ENV:-$root/.venv}}
  if [ ! -x "$VENV/bin/python" ]; then
    python=$(find_python)
    echo "Making a virtual environment in $VENV"
    "$python" -m venv "$VENV"
  fi
  VENV=$(cd "$VENV" && pwd)
  if ! is_new_enough "$VENV/bin/python"; then
    echo "The environment $VENV has a Python older than 3.11. Remove it, or name another one in LEANGRPO_VENV." >&2
    return 1
  fi

  # What is installed depends on these files and on the place of the checkout (it is editable).
  wanted=$(cd "$root" && "$VENV/bin/python" -c 'import hashlib, pathlib
text = b"".join(pathlib.Path(name).read_bytes() for name in ("setup.py", "constraints.txt"))
print(hashlib.sha256(text).hexdigest(), pathlib.Path.cwd())')
  if [ "$(cat "$VENV/leangrpo.stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "Installing leangrpo and its dependencies into $VENV (about a minute)"
    "$VENV/bin/python" -m pip install --disable-pip-version-check \
      -e "$root[test]" -c "$root/constraints.txt"
    echo "$wanted" >"$VENV/leangrpo.stamp"
  fi
}

# Sourced by quickstart.sh and test.sh: makes .venv and installs the pinned packages, once.
# Usage: source launch/setup_env.sh [dev]
#
# PYTHON       interpreter to use (default: the first of python3.11, python3.12, python3 that fits)
# RHYMEMEG_VENV  where the environment goes (default: .venv in the repository)
# shellcheck shell=bash

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${RHYMEMEG_VENV:-$repo/.venv}
want_dev=${1:-}

fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

fits() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        fits "$PYTHON" || fail "PYTHON=$PYTHON is not Python 3.11 or 3.12"
        printf '%s\n' "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3; do
        if fits "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "Python 3.11 or 3.12 is needed; found: $(python3 --version 2>&1 || echo none). Set PYTHON=/path/to/python3.11"
}

check_machine() {
    [ "$(uname -s)" = Linux ] || fail "Linux is needed, this is $(uname -s)"
    command -v g++ >/dev/null || fail "a C++17 compiler is needed for the draft index: install g++ (Debian: apt-get install g++)"
    "$1" -c 'import venv, ensurepip' 2>/dev/null || fail "$1 has no venv module (Debian: apt-get install python3-venv)"
    "$1" - <<'PY' || fail "the Python headers are missing (Debian: apt-get install python3-dev)"
import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))
PY
    local free_mib
    mkdir -p "$(dirname "$venv")"
    free_mib=$(df -Pm "$(dirname "$venv")" | awk 'NR == 2 {print $4}')
    [ "$free_mib" -ge 6000 ] || fail "6 GB of disk are needed for $venv, only ${free_mib} MB are free"
}

install_torch() {
    # The CPU build: from wherever pip is set up to look, else from PyTorch's own index of CPU wheels.
    "$venv/bin/pip" install -qq --no-deps 'torch==2.13.0+cpu' 2>/dev/null ||
        "$venv/bin/pip" install -qq --no-deps 'torch==2.13.0+cpu' --index-url https://download.pytorch.org/whl/cpu ||
        fail "torch 2.13.0 (CPU build) could not be installed"
}

# What has been installed is recorded as a hash of what was asked for, so that nothing is done twice.
install_once() {
    local stamp=$venv/.installed-$1 wanted
    shift
    wanted=$(cat "${@:2}" | sha256sum)
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && return 0
    "$1" || return 1
    printf '%s' "$wanted" >"$stamp"
}

install_packages() {
    echo "setup: installing packages into $venv (minutes, once)"
    install_torch
    "$venv/bin/pip" install -qq --no-deps -r "$repo/requirements/cpu.txt" || fail "packages could not be installed, see above"
}

install_dev() {
    "$venv/bin/pip" install -qq --no-deps -r "$repo/requirements/dev.txt" || fail "packages could not be installed, see above"
}

install_project() {
    echo "setup: building and installing rhymemeg"
    local log=$venv/build.log
    (cd "$repo" && "$venv/bin/pip" install --no-deps --no-build-isolation -e . >"$log" 2>&1) ||
        { tail -n 40 "$log" >&2; fail "rhymemeg could not be built, the log is $log"; }
}

setup_env() {
    local python
    if ! [ -x "$venv/bin/python" ]; then
        python=$(find_python) || exit 1
        check_machine "$python"
        "$python" -m venv "$venv" || fail "could not make a virtual environment in $venv"
    fi
    install_once packages install_packages "$repo/requirements/cpu.txt" || exit 1
    if [ "$want_dev" = dev ]; then
        install_once dev install_dev "$repo/requirements/dev.txt" || exit 1
    fi
    install_once project install_project "$repo/setup.py" "$repo/pyproject.toml" "$repo"/rhymemeg/histospec/csrc/* || exit 1
    # shellcheck disable=SC1091
    source "$venv/bin/activate"
}

setup_env

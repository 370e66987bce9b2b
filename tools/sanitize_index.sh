#!/usr/bin/env bash
# Build the C++ of histospec with AddressSanitizer and UndefinedBehaviorSanitizer, in a temporary copy of the package, and run
# its tests (hypothesis against the exhaustive matcher) on that build. Stops at the first finding with a non-zero status.
#
#   tools/sanitize_index.sh [pytest arguments]        PYTHON=python3.11 CXX=g++ by default
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python}
cxx=${CXX:-g++}
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT

cp -r "$root/rhymemeg" "$root/tests" "$copy/"
rm -f "$copy"/rhymemeg/histospec/_index*.so

suffix=$("$python" -c "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))")
read -ra includes <<<"$("$python" -m pybind11 --includes)"
"$cxx" -O1 -g -std=c++17 -Wall -Wextra -D_GLIBCXX_ASSERTIONS -fsanitize=address,undefined -fno-sanitize-recover=all \
  -fno-omit-frame-pointer -shared -fPIC "${includes[@]}" "$copy"/rhymemeg/histospec/csrc/*.cc \
  -o "$copy/rhymemeg/histospec/_index$suffix"

cd "$copy"
export PYTHONPATH="$copy" # before any installed copy of the package
nm -D "rhymemeg/histospec/_index$suffix" | grep -q __asan || { echo "the build has no sanitizer in it" >&2; exit 1; }
# Leak checking is off: the interpreter itself keeps memory until it exits.
preload="$("$cxx" -print-file-name=libasan.so) $("$cxx" -print-file-name=libubsan.so)"
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
LD_PRELOAD="$preload" "$python" -c "
import rhymemeg.histospec._index as index
assert index.__file__.startswith('$copy'), index.__file__"
LD_PRELOAD="$preload" "$python" -m pytest tests/histospec/test_index.py tests/histospec/test_policy.py tests/histospec/test_drafter.py -q -p no:cacheprovider "$@"

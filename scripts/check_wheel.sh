#!/usr/bin/env bash
# Build the source distribution and the wheel, and check the wheel in an environment that has nothing else.
#   bash scripts/check_wheel.sh                   with the releases of constraints.txt
#   CONSTRAINTS= bash scripts/check_wheel.sh      with the newest ones
#   PYTHON=python3.13 bash scripts/check_wheel.sh
# The distributions stay in dist/.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
constraints=${CONSTRAINTS-constraints.txt}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "== building"
"$python" -m venv "$work/build"
"$work/build/bin/python" -m pip --quiet --disable-pip-version-check install build
rm -rf dist
"$work/build/bin/python" -m build --outdir dist .

echo "== installing the wheel where nothing else is"
"$python" -m venv "$work/bare"
"$work/bare/bin/python" -m pip --quiet --disable-pip-version-check install ${constraints:+--constraint "$constraints"} dist/*.whl
export PATH="$work/bare/bin:$PATH" HF_HUB_OFFLINE=1
unset PYTHONPATH
cd "$work"    # not the clone: what answers is the wheel

echo "== using it"
version=$(artel --version)
echo "$version"
[ "$version" = "artel $(python -c 'from importlib.metadata import version; print(version("artel-lm"))')" ]
artel recipes ls
artel config check demo > run.txt
grep -q 'run: runs/demo' run.txt
python -m pip --disable-pip-version-check check
echo "== $(cd "$OLDPWD" && ls dist | tr '\n' ' ')are whole"

#!/bin/sh
# Make .venv ready: a Python of 3.12 or later that works here, this project (editable) and the extras named as arguments.
# Does nothing when that was done already for these pyproject.toml and constraints.txt.
set -eu
cd "$(dirname "$0")/.."
venv=.venv
stamp=$venv/.ready # line 1: what it was made from; line 2: the extras that are in it
sum=$(cat pyproject.toml constraints.txt | cksum)

# A candidate counts when it runs: a pyenv shim can exist and fail, and Debian's python3 can lack what venv needs.
works() {
    "$1" -c 'import ensurepip, sys, venv; raise SystemExit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

find_python() {
    pyenv=${PYENV_ROOT:-$HOME/.pyenv}/versions
    tried=
    # 3.12 first: constraints.txt was measured with it.
    for candidate in python3.12 "$pyenv"/3.12*/bin/python python3.13 python3.14 python3 "$pyenv"/3.1[3-9]*/bin/python; do
        if works "$candidate"; then
            echo "$candidate"
            return
        fi
        tried="$tried $candidate"
    done
    echo "setup_venv.sh: no working Python 3.12 or later with venv and ensurepip; tried:$tried" >&2
    return 1
}

have=
if [ -f "$stamp" ] && [ "$(sed -n 1p "$stamp")" = "$sum" ] && works $venv/bin/python; then
    have=$(sed -n 2p "$stamp")
fi
missing=
[ -n "$have" ] || missing=core
for extra in "$@"; do
    case " $have " in *" $extra "*) ;; *) missing="$missing $extra" ;; esac
done
[ -n "$missing" ] || exit 0

if ! works $venv/bin/python; then
    if [ -e $venv ] && [ ! -f $venv/pyvenv.cfg ]; then
        echo "setup_venv.sh: $venv exists and is no virtual environment; move it away" >&2
        exit 1
    fi
    python=$(find_python)
    [ ! -e $venv ] || echo "setup_venv.sh: the Python of $venv is older than 3.12 or does not run: making it anew"
    "$python" -m venv --clear $venv
fi

all=$(printf '%s\n' $have "$@" | grep -vx core | sort -u | paste -sd, -) || all=
echo "setup_venv.sh: installing into $venv ($($venv/bin/python --version)); the first time takes minutes"
if ! $venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".${all:+[$all]}"; then
    echo "setup_venv.sh: pip failed. With a Python that has the packages already: make TARGET PYTHON=that-python" >&2
    exit 1
fi
printf '%s\n%s\n' "$sum" "core $(echo "$all" | tr , ' ')" >$stamp

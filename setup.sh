#!/usr/bin/env bash
# Make .venv: find a good Python, install the project with what constraints.txt pins. Run by `make setup`; safe to run again at any
# time. Done already: returns at once. Interrupted, killed or moved: starts over. Exit code 2: something a person has to mend.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# What another environment sets must not leak in here (environment modules on clusters do set these).
unset PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

STAMP=.venv/.setup-done        # written last: what the finished .venv was made from
OURS=.venv/.setup-started      # written first: this .venv is ours to remove
LOCK=.venv.lock
LOG=.venv.setup.log
WHERE_TO_GET="get one with 'uv python install 3.12', 'conda create -n py312 python=3.12', 'brew install python@3.12' or 'apt install python3.12 python3.12-venv', or name one: make setup PYTHON=/path/to/python3.12"

say() { echo "setup: $*"; }
stop() { echo "setup: $*" >&2; exit 2; }

# ---- is there anything to do? -----------------------------------------------------------------------------------------------------

# Prints the version and the base interpreter of the Python given; or why it does not serve, and fails.
examine() {
    "$1" - 2>&1 <<'EOF' | tail -n 1
import os, platform, sys, sysconfig
version = "%d.%d" % sys.version_info[:2]
def no(reason):
    sys.exit("is Python %s, but %s" % (version, reason))
if version not in ("3.12", "3.13"):
    no("3.12 or 3.13 is needed (megatron-core has wheels for these)")
if sys.maxsize < 2**32 or sysconfig.get_config_var("Py_GIL_DISABLED"):
    no("a 64-bit build with the GIL is needed")
if platform.system() == "Darwin" and platform.machine() == "x86_64":
    no("it is built for Intel Macs, for which torch has no wheels")
for module in ("venv", "ensurepip", "ssl", "zlib", "ctypes"):
    try:
        __import__(module)
    except ImportError:
        no("without its module %s (on Debian and Ubuntu: apt install python%s-venv)" % (module, version))
print(version, os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))
EOF
}

# The directory belongs to it: a .venv that was moved or copied does not work.
fingerprint() { echo "$(cat pyproject.toml constraints.txt | cksum) $PWD"; }

# Whether .venv was finished, its Python still runs and is the one meant; $1 is the base interpreter asked for, or nothing.
venv_works() {
    [ -f "$STAMP" ] || return 1
    local version base
    { read -r version base; } <"$STAMP"
    [ -z "$1" ] || [ "$1" = "$base" ] || return 1
    [ "$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$version" ] || return 1
    [ -d ".venv/lib/python$version/site-packages/torch" ] && [ "$(sed -n 3p "$STAMP")" = "$PWD" ]
}
up_to_date() { venv_works "$1" && [ "$(sed -n 2p "$STAMP")" = "$(fingerprint)" ]; }

wanted=""
if [ -n "${PYTHON:-}" ]; then
    found=$(command -v "$PYTHON" 2>/dev/null) || stop "PYTHON=$PYTHON is no program; leave PYTHON unset to have one found"
    answer=$(examine "$found") || stop "PYTHON=$PYTHON does not serve: it $answer"
    wanted=${answer#* }
fi
if up_to_date "$wanted"; then exit 0; fi

# ---- one setup at a time ----------------------------------------------------------------------------------------------------------

pip_pid=""
own_lock=""
leave() {
    local code=$?
    trap - EXIT INT TERM HUP
    if [ -n "$pip_pid" ]; then
        kill "$pip_pid" 2>/dev/null || true
        wait "$pip_pid" 2>/dev/null || true
    fi
    # An update that ended before pip changed anything leaves the .venv as it was.
    if [ -f "$STAMP.before" ] && ! grep -q '^Installing collected' "$LOG" 2>/dev/null; then mv "$STAMP.before" "$STAMP"; fi
    if [ -n "$own_lock" ]; then rm -rf "$LOCK"; fi
    exit "$code"
}
trap leave EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# The lock names this process and then its pip, which outlives a killed setup: that one is ended, as its .venv is made anew.
lock_is_held() {
    local owner="" orphan=""
    { read -r owner && read -r orphan; } 2>/dev/null <"$LOCK/pids" || true
    if [ -z "$owner" ] || kill -0 "$owner" 2>/dev/null; then [ -n "$owner" ]; return; fi
    case "$(ps -o args= -p "${orphan:-0}" 2>/dev/null)" in *"-m pip install"*) kill -9 "$orphan" 2>/dev/null || true ;; esac
    return 1
}
waited=""
until mkdir "$LOCK" 2>/dev/null; do
    [ -w . ] || stop "cannot write into $PWD"
    if ! lock_is_held; then
        sleep 1 # its owner may be about to write its number
        if ! lock_is_held; then rm -rf "$LOCK"; fi
        continue
    fi
    if [ -z "$waited" ]; then say "another setup is at work here, waiting for it"; fi
    waited=yes
    sleep 1
done
own_lock=yes
echo $$ >"$LOCK/pids"
if up_to_date "$wanted"; then exit 0; fi

# ---- find a Python ----------------------------------------------------------------------------------------------------------------

candidates() {
    local name root minor
    for name in python3.12 python3.13 python3; do command -v "$name" 2>/dev/null || true; done
    for minor in 3.12 3.13; do
        for root in "${PYENV_ROOT:-$HOME/.pyenv}" "$HOME/.pyenv"; do
            # newest patch release first
            for name in $(ls "$root/versions" 2>/dev/null | grep "^$minor\.[0-9]*$" | sort -t. -k3,3nr); do
                echo "$root/versions/$name/bin/python"
            done
        done
        if command -v uv >/dev/null 2>&1; then uv python find --no-project "$minor" 2>/dev/null || true; fi
        for root in /opt/homebrew /usr/local /home/linuxbrew/.linuxbrew; do
            echo "$root/bin/python$minor"
            echo "$root/opt/python@$minor/bin/python$minor"
        done
        echo "/usr/bin/python$minor"
        for root in "${CONDA_PREFIX:-}" "$HOME/miniforge3" "$HOME/miniconda3" "$HOME/mambaforge" "$HOME/anaconda3" /opt/conda; do
            if [ -z "$root" ]; then continue; fi
            ls "$root/bin/python$minor" "$root"/envs/*/"bin/python$minor" 2>/dev/null || true
        done
    done
}

if [ -n "$wanted" ]; then
    python=$found
    version=${answer%% *}
    case "$python" in "$PWD"/.venv/* | .venv/*) python=$wanted ;; esac # its own .venv may have to go
elif venv_works ""; then
    { read -r version wanted; } <"$STAMP"
else
    python=""
    near_miss=""
    while IFS= read -r candidate; do
        if [ ! -x "$candidate" ]; then continue; fi
        case "$candidate" in "$PWD"/.venv/*) continue ;; esac # activated, and about to go
        if answer=$(examine "$candidate"); then
            python=$candidate
            version=${answer%% *}
            wanted=${answer#* }
            break
        fi
        # Worth naming: the right version with a part missing. (A pyenv shim without its Python fails too, and says nothing useful.)
        case "$answer" in "is Python 3.12, but without"* | "is Python 3.13, but without"*) near_miss=" ($candidate $answer)" ;; esac
    done < <(candidates | awk '!seen[$0]++')
    [ -n "$python" ] || stop "there is no complete Python 3.12 or 3.13 here$near_miss: $WHERE_TO_GET"
fi

# ---- make .venv -------------------------------------------------------------------------------------------------------------------

# Renamed first: a removal that is interrupted leaves no half .venv behind.
remove_venv() {
    mv .venv ".venv.old.$$"
    rm -rf .venv.old.*
}

rm -rf .venv.old.*
if [ -e .venv ] || [ -L .venv ]; then
    if [ ! -f "$OURS" ] && ! rmdir .venv 2>/dev/null; then
        stop "$PWD/.venv was not made by 'make setup': move it away and run this again"
    fi
    if [ -d .venv ] && ! venv_works "$wanted"; then
        say "removing a .venv that was left unfinished, has lost its Python, has another Python or comes from another folder"
        remove_venv
    fi
fi

started=$SECONDS
if [ "$(uname -s)" = Linux ]; then
    needed_gb=7 size="torch with CUDA is about 3 GB to download and 5 GB on disk"
else
    needed_gb=2 size="about 0.5 GB to download and 1.5 GB on disk"
fi
if [ -d .venv ]; then
    say "bringing .venv up to date with pyproject.toml and constraints.txt"
    mv "$STAMP" "$STAMP.before"
else
    free_kb=$(df -Pk . | awk 'NR == 2 {print $4}')
    [ "$free_kb" -ge $((needed_gb * 1000 * 1000)) ] || stop "$PWD has $((free_kb / 1000 / 1000)) GB free, and $needed_gb GB are needed"
    say "making .venv with Python $version ($python)"
    mkdir .venv
    : >"$OURS"
    "$python" -m venv .venv || stop "'$python -m venv .venv' failed: install its venv module, or name another Python: make setup PYTHON=..."
    say "installing what constraints.txt pins ($size): a few minutes, more on a slow line"
fi

# pip talks to the log. Its verbosity options cannot tell the warnings of a site's configuration from an error, the filter below can.
.venv/bin/python -m pip install --no-color --progress-bar off -c constraints.txt -e ".[dev]" >"$LOG" 2>&1 </dev/null &
pip_pid=$!
echo "$pip_pid" >>"$LOCK/pids"
next=$((SECONDS + 20))
while kill -0 "$pip_pid" 2>/dev/null; do
    sleep 1
    if [ "$SECONDS" -ge "$next" ]; then
        stage="downloading, $(grep -c '^Collecting' "$LOG" || true) packages so far"
        if grep -q '^Installing collected' "$LOG"; then stage="unpacking, $(du -sm .venv 2>/dev/null | awk '{print $1}') MB so far"; fi
        say "  $((SECONDS - started)) s: $stage"
        next=$((SECONDS + 20))
    fi
done
code=0
wait "$pip_pid" || code=$?
pip_pid=""
if [ "$code" -ne 0 ]; then
    grep -vE '^ *(WARNING|DEPRECATION|\[notice\]|Looking|Obtaining|Collecting|Requirement|Downloading|Using cached|Preparing|Getting|Installing|Checking|Created|Processing)' \
        "$LOG" | tail -n 20 >&2 || true
    say "pip could not install the packages (its last words are above, all of them in $LOG); run this again to retry" >&2
    exit 1
fi

.venv/bin/python -c 'import torch, hybrid_megatron' || {
    say "the packages are installed but do not import (the error is above)" >&2
    exit 1
}
printf '%s %s\n%s\n%s\n' "$version" "$wanted" "$(fingerprint)" "$PWD" >.venv/.setup-stamp
mv .venv/.setup-stamp "$STAMP"
rm -f "$STAMP.before" "$LOG"
say "done in $((SECONDS - started)) s"

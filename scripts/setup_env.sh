#!/usr/bin/env bash
# Makes the Python environment that this clone uses, if it is missing.
#
#   scripts/setup_env.sh                 make or find it; well under a second when it is there
#   scripts/setup_env.sh --print         say where the shared environment is or would be
#   scripts/setup_env.sh --prune         remove the shared environments that this clone doesn't use
#   scripts/setup_env.sh --constraints   resolve the dependencies afresh into constraints.txt
#
# The packages (11 GB) are installed once into <cache>/envs/<key>; the key is the hash of what
# defines them, so clones share an environment and a changed dependency makes a new one. The
# clone's own .venv is thin: it adds the clone and the shared packages to sys.path.
#
#   PAGEALIGN_CACHE   the cache folder (default: $XDG_CACHE_HOME/pagealign or ~/.cache/pagealign)
#   PYTHON            the Python 3.11 to use (default: the first that PATH has)
set -euo pipefail

readonly WANTED=3.11
readonly ENV_GB=11      # installed size
readonly WHEELS_GB=5    # what pip downloads; gone again when it is done
readonly LAYOUT=1       # raise when the thin .venv changes, so that old ones are remade

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

say() { printf '%s\n' "$*"; }
die() {
    printf 'setup_env: %s\n' "$*" >&2
    exit 1
}

# -- what is asked for ---------------------------------------------------------------------

find_python() {
    local candidate version
    local -a candidates=(python3.11 python3 python)
    [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
            continue
        if [[ $version == "$WANTED" ]]; then
            python=$candidate
            return
        fi
        [[ -z ${PYTHON:-} ]] || die "PYTHON=$PYTHON is Python $version; Python $WANTED is needed"
    done
    [[ -z ${PYTHON:-} ]] || die "PYTHON=$PYTHON does not run; name a Python $WANTED"
    die "no Python $WANTED on PATH; install it, or name it: PYTHON=/path/to/python3.11 make env"
}

# Prints the cache root and the key of the environment, one a line.
describe() {
    "$python" -I -B - "$repo" <<'PY'
import hashlib, json, pathlib, platform, sys, tomllib

repo = pathlib.Path(sys.argv[1])
sys.path.insert(0, str(repo))
from pagealign.paths import cache_root

project = tomllib.loads((repo / "pyproject.toml").read_text(encoding="utf-8"))["project"]
pins = (repo / "constraints.txt").read_text(encoding="utf-8").splitlines()
defines = [
    project["dependencies"],
    project["optional-dependencies"],
    [pin for pin in pins if pin and not pin.startswith("#")],
    "%d.%d" % sys.version_info[:2],
    platform.system(),
    platform.machine(),
]
print(cache_root())
print(hashlib.sha256(json.dumps(defines).encode()).hexdigest()[:12])
PY
}

# Prints the dependencies of pyproject.toml, one a line.
requirements() {
    "$python" -I - "$repo" <<'PY'
import pathlib, sys, tomllib

project = tomllib.loads(
    (pathlib.Path(sys.argv[1]) / "pyproject.toml").read_text(encoding="utf-8")
)["project"]
for line in [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]:
    print(line)
PY
}

# -- is it there? --------------------------------------------------------------------------

# Succeeds if the shared environment is complete and the Python that it stands on still runs.
shared_is_ready() { [[ -f $shared/.complete ]] && "$shared/bin/python" -I -c pass 2>/dev/null; }

stamp() { printf '%s\n' "$LAYOUT" "$repo" "$shared"; }

# Succeeds if .venv belongs to this place of the clone and to this shared environment.
thin_is_ready() {
    [[ -x $thin/bin/python && -f $thin/.pagealign ]] && [[ $(<"$thin/.pagealign") == "$(stamp)" ]]
}

# -- the shared environment ----------------------------------------------------------------

check_disk() {
    local free_gb need_gb=$((ENV_GB + WHEELS_GB)) old hint=
    free_gb=$(df -Pk "$envs" | awk 'NR == 2 { print int($4 / 1000000) }')
    ((free_gb < need_gb)) || return 0
    old=$(other_envs | wc -l)
    ((old == 0)) || hint=" \`scripts/setup_env.sh --prune\` removes $old unused environment(s)."
    die "the environment needs ${need_gb} GB free in $envs (${ENV_GB} GB, and ${WHEELS_GB} GB" \
        "while it is installed), ${free_gb} GB are free.$hint Free some, or move the cache:" \
        "PAGEALIGN_CACHE=/path/with/space make env"
}

other_envs() {
    local dir
    for dir in "$envs"/*/; do
        [[ ! -d $dir || ${dir%/} == "$shared" ]] || say "${dir%/}"
    done
}

# Waits until no other clone on this machine builds; the lock goes when this process does.
take_lock() {
    local waited=0
    command -v flock >/dev/null || die "flock is missing; install util-linux"
    exec 9>"$envs/.lock"
    flock -n 9 && return
    say "waiting for another clone that is building an environment"
    until flock -w 15 9; do
        waited=$((waited + 15))
        say "  $waited s"
    done
}

# One line about how far pip is, from its log.
pip_progress() {
    if grep -q '^Installing collected packages' "$log"; then
        local -a installed=("$shared"/lib/python*/site-packages/*.dist-info)
        say "installed $((${#installed[@]} - 1)) of $total packages" # all but pip
    else
        say "resolved $(grep -cE '^(Collecting|Processing) ' "$log" || true) of $total packages:" \
            "$(grep -E "^ *(Collecting|Downloading)" "$log" | tail -n 1 | cut -c 1-70)"
    fi
}

# Shows pip's progress until it ends: in place on a terminal, else a line every 15 seconds.
watch_pip() {
    local every=15 start=$SECONDS shown=$SECONDS
    [[ ! -t 1 ]] || every=1
    while kill -0 "$pip" 2>/dev/null; do
        sleep 0.2
        ((SECONDS - shown >= every)) || continue
        shown=$SECONDS
        if [[ -t 1 ]]; then
            printf '\r\033[K  %4d s  %s' "$((SECONDS - start))" "$(pip_progress)"
        else
            printf '  %4d s  %s\n' "$((SECONDS - start))" "$(pip_progress)"
        fi
    done
    [[ ! -t 1 ]] || printf '\r\033[K'
}

# However a build ends before its last line: stop pip, and give the disk back.
# shellcheck disable=SC2329  # called by a trap
abandon() {
    if [[ -n ${pip:-} ]]; then
        kill "$pip" 2>/dev/null || true
        wait "$pip" 2>/dev/null || true
    fi
    rm -rf "$shared" "$downloads"
}

build_shared() {
    total=$(grep -c '^[A-Za-z0-9]' "$repo/constraints.txt")
    log=$envs/$key.log
    downloads=$envs/.downloads.$key
    rm -rf "$shared" "$downloads"
    check_disk
    "$python" -I -c 'import ensurepip, venv' 2>/dev/null ||
        die "$python cannot make virtual environments; on Debian: apt install python3.11-venv"

    say "installing $total packages into $shared (once per machine; takes some minutes)"
    # A broken or interrupted build must not be found by the next run.
    trap abandon EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    mkdir "$downloads"
    "$python" -m venv "$shared"
    requirements >"$downloads/requirements.txt"
    # A setting of the user's that sends packages elsewhere would leave this environment empty.
    # No bytecode now: Python writes that of the few packages in use as it imports them.
    env -u PIP_TARGET -u PIP_PREFIX -u PIP_USER TMPDIR="$downloads" \
        "$shared/bin/python" -m pip install --no-compile --progress-bar off --no-input \
        --disable-pip-version-check -c "$repo/constraints.txt" -r "$downloads/requirements.txt" \
        </dev/null >"$log" 2>&1 &
    pip=$!
    watch_pip
    wait "$pip" || {
        pip=
        tail -n 15 "$log" >&2
        die "pip failed; its whole output is in $log"
    }
    pip=
    say "checking that the packages load"
    OMP_NUM_THREADS=1 "$shared/bin/python" -c 'import torch, transformers, sglang' >>"$log" 2>&1 || {
        tail -n 15 "$log" >&2
        die "the installed packages do not load; see $log"
    }
    rm -rf "$downloads"
    date -u +%FT%TZ >"$shared/.complete"
    trap - EXIT INT TERM HUP
}

# -- the clone's .venv ---------------------------------------------------------------------

build_thin() {
    if [[ -e $thin || -L $thin ]]; then
        [[ -f $thin/.pagealign ]] ||
            die "$thin was not made by this script; move it or delete it, then run this again"
        rm -rf "$thin"
    fi
    mkdir "$thin"
    : >"$thin/.pagealign"
    "$shared/bin/python" -m venv --without-pip "$thin"
    "$thin/bin/python" -I - "$repo" "$shared" <<'PY'
import pathlib, sys, sysconfig

repo, shared = sys.argv[1:]
site_packages = sysconfig.get_path("purelib", vars={"base": shared, "platbase": shared})
# ASCII reprs: a .pth file is read in the encoding of the locale.
pathlib.Path(sysconfig.get_path("purelib"), "pagealign.pth").write_text(
    f"import site, sys; sys.path.append({repo!a}); site.addsitedir({site_packages!a})\n"
)
PY
    write_script pagealign
    write_script pytest
    ln -s "$shared/bin/ruff" "$shared/bin/shellcheck" "$shared/bin/ninja" "$thin/bin/"
    stamp >"$thin/.pagealign"
}

# No absolute path in it: kernels cut long #! lines, and a path may have spaces.
write_script() {
    cat >"$thin/bin/$1" <<SH
#!/bin/sh
here=\$(dirname -- "\$(readlink -f -- "\$0")")
exec "\$here/python" -P -m $1 "\$@"
SH
    chmod +x "$thin/bin/$1"
}

# -- commands ------------------------------------------------------------------------------

make_envs() {
    mkdir -p "$envs" 2>/dev/null && [[ -w $envs ]] ||
        die "cannot write $envs; move the cache: PAGEALIGN_CACHE=/a/path make env"
}

make_env() {
    if shared_is_ready && thin_is_ready; then
        say "environment ready: $shared"
        return
    fi
    make_envs
    take_lock
    shared_is_ready || build_shared
    thin_is_ready || build_thin
    say "environment ready: $shared"
}

prune() {
    local dir count=0
    make_envs
    take_lock
    while IFS= read -r dir; do
        say "removing $dir"
        rm -rf "$dir" "$dir.log"
        count=$((count + 1))
    done < <(other_envs)
    say "removed $count environment(s)"
}

# Asks pip what it would install with no pins but sglang's own, and writes that down.
write_constraints() {
    local work
    work=$(mktemp -d)
    # shellcheck disable=SC2064  # its value now
    trap "rm -rf '$work'" EXIT
    requirements >"$work/requirements.txt"
    "$python" -m venv "$work/venv"
    say "resolving (some minutes: the packages are downloaded, not installed)"
    "$work/venv/bin/python" -m pip install --dry-run --ignore-installed --quiet \
        --report "$work/report.json" -r "$work/requirements.txt" </dev/null
    "$python" -I - "$work/report.json" "$repo/constraints.txt" <<'PY'
import json, pathlib, sys

report, constraints = map(pathlib.Path, sys.argv[1:])
packages = [item["metadata"] for item in json.loads(report.read_text())["install"]]
# "+cu130" and the like name a build of another index; PyPI has the plain version.
pins = {p["name"].lower().replace("_", "-"): p["version"].split("+")[0] for p in packages}
header = [
    "# The whole environment (Python 3.11, Linux x86_64), pinned; `make constraints` rewrites it",
    "# from the dependencies in pyproject.toml.",
]
lines = header + [f"{name}=={version}" for name, version in sorted(pins.items())]
new = constraints.with_suffix(".new")
new.write_text("\n".join(lines) + "\n")
new.replace(constraints)
print(f"{len(pins)} packages written to {constraints}")
PY
}

main() {
    local described
    (($# <= 1)) || die "one option at most; see the head of scripts/setup_env.sh"
    unset PYTHONPATH PYTHONHOME
    find_python
    if [[ ${1:-} == --constraints ]]; then
        write_constraints
        return
    fi
    described=$(describe) || die "cannot read pyproject.toml and constraints.txt in $repo"
    { read -r cache && read -r key; } <<<"$described"
    envs=$cache/envs
    shared=$envs/$key
    thin=$repo/.venv
    case ${1:-} in
        "") make_env ;;
        --print) say "$shared" ;;
        --prune) prune ;;
        *) die "unknown option $1; see the head of scripts/setup_env.sh" ;;
    esac
}

# On one line: bash reads a script as it runs, and this one may change meanwhile.
main "$@"; exit

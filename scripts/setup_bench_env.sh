#!/usr/bin/env bash
# Makes the environment of the kernel benchmarks, if it is missing.
#
#   scripts/setup_bench_env.sh            make or find it; prints the folder
#   scripts/setup_bench_env.sh --print    say where it is or would be
#   scripts/setup_bench_env.sh --remove   remove it, and those of other pins
#
# Intel Extension for PyTorch 2.8.0 needs torch 2.8.0, the pinned SGLang another one: so the two
# have an environment each. The packages lie in <cache>/bench-envs/<key>; the key is the hash of
# pagealign/bench/constraints.txt, so clones share it. No GPU is used, but the package index's
# own torch brings CUDA's libraries; where pip knows an index with 2.8.0+cpu, it takes that, and
# most of the disk stays free: PIP_EXTRA_INDEX_URL=... scripts/setup_bench_env.sh
#
#   PAGEALIGN_CACHE   the cache folder (default: $XDG_CACHE_HOME/pagealign or ~/.cache/pagealign)
#   PYTHON            the Python 3.11 to use (default: python3.11)
set -euo pipefail

readonly NEED_GB=11 # 7 installed, and what pip downloads meanwhile

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
constraints=$repo/pagealign/bench/constraints.txt
python=${PYTHON:-python3.11}

say() { printf '%s\n' "$*"; }
die() {
    printf 'setup_bench_env: %s\n' "$*" >&2
    exit 1
}

# Prints the cache root and the key of the environment, one a line.
describe() {
    "$python" -I -B - "$repo" "$constraints" <<'PY'
import hashlib, pathlib, platform, sys

sys.path.insert(0, sys.argv[1])
from pagealign.paths import cache_root

pins = pathlib.Path(sys.argv[2]).read_text(encoding="utf-8").splitlines()
defines = [pin for pin in pins if pin and not pin.startswith("#")]
defines += ["%d.%d" % sys.version_info[:2], platform.system(), platform.machine()]
print(cache_root())
print(hashlib.sha256("\n".join(defines).encode()).hexdigest()[:12])
PY
}

is_ready() { [[ -f $env/.complete ]] && "$env/bin/python" -I -c pass 2>/dev/null; }

# However a build ends before its last line: stop pip, and give the disk back.
# shellcheck disable=SC2329  # called by a trap
abandon() {
    if [[ -n ${pip:-} ]]; then
        kill "$pip" 2>/dev/null || true
        wait "$pip" 2>/dev/null || true
    fi
    rm -rf "$env" "$downloads"
}

build() {
    local free_gb
    log=$env.log
    downloads=$envs/.downloads.$key
    free_gb=$(df -Pk "$envs" | awk 'NR == 2 { print int($4 / 1000000) }')
    ((free_gb >= NEED_GB)) || die "$NEED_GB GB are needed in $envs, $free_gb GB are free; free" \
        "some, or move the cache: PAGEALIGN_CACHE=/path/with/space make bench-kernels"
    say "installing the benchmarks' packages into $env (once per machine; some minutes)"
    trap abandon EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    rm -rf "$env" "$downloads"
    mkdir "$downloads"
    "$python" -m venv "$env" || die "$python cannot make virtual environments; see above"
    # A setting of the user's that sends packages elsewhere would leave this environment empty.
    env -u PIP_TARGET -u PIP_PREFIX -u PIP_USER TMPDIR="$downloads" \
        "$env/bin/python" -m pip install --no-compile --progress-bar off --no-input \
        --disable-pip-version-check -c "$constraints" -r "$repo/pagealign/bench/requirements.txt" \
        </dev/null >"$log" 2>&1 &
    pip=$!
    wait "$pip" || {
        pip=
        tail -n 15 "$log" >&2
        die "pip failed; its whole output is in $log"
    }
    pip=
    say "checking that torch loads"
    "$env/bin/python" -c 'import torch' >>"$log" 2>&1 || {
        tail -n 15 "$log" >&2
        die "torch does not load; see $log"
    }
    rm -rf "$downloads"
    date -u +%FT%TZ >"$env/.complete"
    trap - EXIT INT TERM HUP
}

main() {
    local described version
    (($# <= 1)) || die "one option at most; see the head of scripts/setup_bench_env.sh"
    unset PYTHONPATH PYTHONHOME
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
        die "$python does not run; name a Python 3.11: PYTHON=/path/to/python3.11"
    [[ $version == 3.11 ]] || die "$python is Python $version; the packages are for 3.11"
    described=$(describe) || die "cannot read $constraints"
    { read -r cache && read -r key; } <<<"$described"
    envs=$cache/bench-envs
    env=$envs/$key
    case ${1:-} in
        --print) say "$env" ;;
        --remove) rm -rf "$envs" && say "removed $envs" ;;
        "")
            mkdir -p "$envs" 2>/dev/null && [[ -w $envs ]] ||
                die "cannot write $envs; move the cache: PAGEALIGN_CACHE=/a/path"
            # Another clone may be building; the lock goes when this process does.
            exec 9>"$envs/.lock"
            flock -n 9 || {
                say "waiting for another clone that is building"
                flock 9
            }
            is_ready || build
            say "$env"
            ;;
        *) die "unknown option $1; see the head of scripts/setup_bench_env.sh" ;;
    esac
}

# On one line: bash reads a script as it runs, and this one may change meanwhile.
main "$@"; exit

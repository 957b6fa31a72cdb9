#!/usr/bin/env bash
# Apply the patch series to an SGLang tree, take it back, or say what a tree holds.
# All or nothing: the touched files are patched and verified in a folder beside them,
# then renamed into place. `--help` lists the options and the exit codes.

set -euo pipefail
shopt -s nullglob
export LC_ALL=C
unset CDPATH GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE

usage() {
  cat <<'EOF'
usage: apply_patches.sh [--check | --reverse | --status] [--core | --series NAME]
                        [--patches DIR] (--installed | [--] PATH)

Applies the patch series to the SGLang tree at PATH: a git checkout's root, its python/
folder, an unpacked package (a folder that holds sglang/), or the sglang folder itself.

  --installed    the sglang that ${PYTHON:-python3} would import
  --check        say whether it would apply; change nothing
  --reverse      put the stock files back, byte for byte; also after a killed run
  --status       say what the tree holds, file by file; change nothing
  --core         leave the fixes_* diffs out
  --series NAME  an alternative in the series' place: alternatives/varlen, which is
                 for comparison only
  --patches DIR  other patches (default: the patches folder beside this script's)

Needs bash, coreutils and git (or patch). Until every file has been patched and verified,
the tree is as it was; then the files are renamed into place, with signals held. A run
killed in between leaves each file either as it was or patched: --status says so, and
--reverse puts the tree right.

Exit codes, each with one line on stderr; the tree has changed only where it is 0:
   0  done, or nothing to do        8  read-only tree
   1  could not be done             9  neither git nor patch (or no sha256sum, or python)
   2  wrong usage                  10  a touched file has CRLF line ends
   3  no such path                 11  a touched file is reached through a symbolic link
   4  no SGLang there              12  another run is at work on the tree
   5  another release              13  the patches folder is incomplete
   6  a touched file differs       14  --core, but the fixes are applied too
   7  partly applied               15  another series is applied
                                   128 and more: interrupted by a signal
EOF
}

readonly FAILED=1 USAGE=2 NO_PATH=3 NO_SGLANG=4 OTHER_RELEASE=5 DIFFERS=6 PARTLY=7 \
  READ_ONLY=8 NO_TOOL=9 HAS_CRLF=10 SYMLINK=11 BUSY=12 BAD_SERIES=13 HAS_FIXES=14 \
  HAS_OTHER=15

die() { # CODE MESSAGE...
  local code=$1
  shift
  echo "apply_patches: $*" >&2
  exit "$code"
}

# --- what is pinned -------------------------------------------------------------------
# A tree is at a level: 0 stock, 1 core, 2 all. upto[LEVEL] is how many of the diffs that
# is, want[3 * i + LEVEL] the SHA-256 of files[i] there, "-" where it doesn't exist.

level_names=(stock 'core applied' applied)
diffs=() files=() want=() upto=() release='' tag=''

# An alternative has a folder of its own in the patches folder, with PIN and series, and is
# named after its diff: alternatives/varlen.
select_series() { # NAME
  local file name known=''
  for file in "$root"/*/*.diff; do
    name=${file#"$root/"} name=${name%.diff} known="$known $name"
    [ "$name" != "$1" ] || { patches=${file%/*} && return; }
  done
  die $USAGE "no series $1: there is${known:- none}"
}

read_series() {
  [ -r "$patches/PIN" ] && [ -r "$patches/series" ] ||
    die $BAD_SERIES "no PIN and series in $patches: name the folder with --patches"
  local core=0 key a b c path name line
  while read -r key a b c path; do
    case $key in
      release) release=$a ;;
      tag) tag=$a ;;
      file) want+=("$a" "$b" "$c") files+=("${path#python/sglang/}") ;;
    esac
  done <"$patches/PIN"
  while read -r name _; do
    case $name in '' | '#'*) continue ;; esac
    [ -r "$patches/$name" ] || die $BAD_SERIES "$patches/series names $name, which isn't there"
    diffs+=("$name")
    case $name in fixes_*) ;; *) core=${#diffs[@]} ;; esac
    while read -r line; do
      case $line in 'diff --git '*) check_pinned "${line##* b/}" "$name" ;; esac
    done <"$patches/$name"
  done <"$patches/series"
  [ -n "$release" ] && [ ${#files[@]} -gt 0 ] ||
    die $BAD_SERIES "$patches/PIN names no release or no file: restore it"
  upto=(0 "$core" ${#diffs[@]})
}

check_pinned() { # FILE DIFF
  local file
  for file in "${files[@]}"; do [ "python/sglang/$file" != "$1" ] || return 0; done
  die $BAD_SERIES "$2 touches $1, which $patches/PIN lacks: run python -m pagealign.series pin"
}

# --- what is there --------------------------------------------------------------------

find_tree() { # PATH: sets tree, the sglang package folder, free of symbolic links
  [ -e "$1" ] || die $NO_PATH "no such path: $1"
  local dir
  for dir in "$1/python/sglang" "$1/sglang" "$1"; do
    [ -f "$dir/version.py" ] && [ -d "$dir/srt" ] || continue
    tree=$(cd -P -- "$dir" && pwd)
    return
  done
  die $NO_SGLANG "no SGLang in $1: give a checkout's root, its python/ folder," \
    "or the folder that holds sglang/"
}

find_installed() {
  local python=${PYTHON:-python3} dir
  command -v "$python" >/dev/null || die $NO_TOOL "no $python: set PYTHON to an interpreter"
  dir=$("$python" -c '
import sys
sys.path = [p for p in sys.path if p]  # not the folder that we happen to be in
from importlib.util import find_spec
print(find_spec("sglang").submodule_search_locations[0])' 2>/dev/null) ||
    die $NO_SGLANG "$python finds no sglang: set PYTHON to the interpreter that has it"
  find_tree "$dir"
}

release_there() { # prints the tree's release, or nothing where that can't be told
  local root=${tree%/python/sglang} version='' file line
  if [ "$root" != "$tree" ] && [ -e "$root/.git" ]; then
    version=$(git -C "$root" describe --tags --match 'v[0-9]*' 2>/dev/null) || version=''
    version=${version#v}
    [ "${version%-*-g*}" != "$release" ] || version=$release # and one's own commits on top
  fi
  for file in "$tree/_version.py" "$tree/version.py"; do
    [ -z "$version" ] && [ -r "$file" ] || continue
    while IFS= read -r line; do
      case $line in __version__*=*[\'\"][0-9]*) version=${line##*= } ;; esac
    done <"$file"
  done
  for file in "${tree%/*}"/sglang-*.dist-info; do
    [ -z "$version" ] || break
    version=${file##*/sglang-} version=${version%.dist-info}
  done
  version=${version//[\'\"$'\r']/} version=${version%%+*}
  case $version in *dev*) ;; *) echo "$version" ;; esac
}

sha256() { # FILE: its hash, "-" where there is none
  [ -e "$1" ] || { echo - && return; }
  [ -f "$1" ] && [ -r "$1" ] || { echo unreadable && return; }
  local sum
  sum=$("${hasher[@]}" <"$1") && echo "${sum%% *}"
}

look() { # sets have, the hashes of the files in the tree
  local i
  for i in "${!files[@]}"; do have[i]=$(sha256 "$tree/${files[i]}"); done
}

tree_is_at() { # LEVEL
  local i
  for i in "${!files[@]}"; do [ "${have[i]}" = "${want[3 * i + $1]}" ] || return 1; done
}

file_level() { # I: prints the level that file I is at; fails where it is at none
  local level
  for level in 0 2 1; do
    [ "${have[$1]}" != "${want[3 * $1 + level]}" ] || { echo $level && return; }
  done
  return 1
}

tree_state() {
  local level i
  for level in 0 2 1; do
    if tree_is_at $level; then echo "${level_names[level]}" && return; fi
  done
  for i in "${!files[@]}"; do
    file_level "$i" >/dev/null || { echo unknown && return; }
  done
  echo 'partly applied'
}

file_state() { # I
  local level sum=none
  if level=$(file_level "$1"); then
    echo "${level_names[level]}"
  elif [ "${have[$1]}" = - ]; then
    echo missing
  else
    [ "${have[$1]}" = unreadable ] ||
      sum=$(tr -d '\r' <"$tree/${files[$1]}" | "${hasher[@]}")
    case "${want[*]:3*$1:3} " in
      *"${sum%% *} "*) echo 'CRLF line ends' ;;
      *) echo differs ;;
    esac
  fi
}

# --- what to say about it -------------------------------------------------------------

status() {
  local i state head="$tree: SGLang ${there:-of unknown release} (pinned: $release)"
  look
  state=$(tree_state)
  echo "$head${series:+, series $series}: $state"
  for i in "${!files[@]}"; do printf '  %-15s %s\n' "$(file_state "$i")" "${files[i]}"; done
  check_release
  refuse "$state"
}

check_release() {
  [ -z "$there" ] || [ "$there" = "$release" ] ||
    die $OTHER_RELEASE "$tree is SGLang $there, the series is for $release:" \
      "check out $tag, or install sglang==$release"
}

refuse() { # STATE: returns where the tree is at a level
  local i first='' count=0 more=''
  [ "$1" != 'partly applied' ] ||
    die $PARTLY "$tree is partly applied: $reverse puts the stock files back, then apply again"
  [ "$1" = unknown ] || return 0
  refuse_other
  for i in "${!files[@]}"; do
    file_level "$i" >/dev/null || { first=${first:-$i} && count=$((count + 1)); }
  done
  [ $count = 1 ] || more=" (and $((count - 1)) more: see --status)"
  case $(file_state "$first") in
    CRLF*) die $HAS_CRLF "$tree/${files[first]} has CRLF line ends$more:" \
      "set core.autocrlf to false and check the files out afresh" ;;
    missing) die $DIFFERS "$tree/${files[first]} is missing$more: restore it from $tag" ;;
    *) die $DIFFERS "$tree/${files[first]} differs from SGLang $release's$more:" \
      "restore it from $tag, or reinstall sglang==$release" ;;
  esac
}

# Another series may change some of the same files: whichever is there must go first.
refuse_other() { # returns where no file is as another series makes it
  local dir found name
  for dir in "$root" "$root"/*/; do
    dir=${dir%/}
    [ "$dir" != "$patches" ] && [ -r "$dir/PIN" ] || continue
    if ! has_changes_of "$dir"; then continue; fi
    [ "$dir" != "$root" ] ||
      die $HAS_OTHER "$tree has the main series: take it back first, by --reverse alone"
    found=("$dir"/*.diff) name=${found[0]#"$root/"} name=${name%.diff}
    die $HAS_OTHER "$tree has the series $name: take it back first, by --series $name --reverse"
  done
}

has_changes_of() { # DIR: whether a file of the tree is as the series in DIR makes it
  local key before core after path
  while read -r key before core after path; do
    [ "$key" = file ] || continue
    case $(sha256 "$tree/${path#python/sglang/}") in
      "$before") ;;
      "$core" | "$after") return 0 ;;
    esac
  done <"$1/PIN"
  return 1
}

judge() { # GOAL: returns if there is something to do that can be done
  local state
  look
  if tree_is_at "$1"; then
    case $1 in
      0) echo "nothing to reverse: $tree is stock" ;;
      *) echo "already ${level_names[$1]}: $tree" ;;
    esac
    exit 0
  fi
  check_release
  state=$(tree_state)
  [ "$state/$1" != applied/1 ] ||
    die $HAS_FIXES "$tree has the fixes too: --reverse first, then --core"
  [ "$state/$1" = 'partly applied/0' ] || refuse "$state"
  [ "$1" = 0 ] || refuse_other
}

select_changes() { # GOAL: sets changed, the files to replace; refuses what can't be replaced
  local i file dir
  changed=()
  for i in "${!files[@]}"; do
    [ "${have[i]}" != "${want[3 * i + $1]}" ] || continue
    file=$tree/${files[i]} dir=$tree/${files[i]}
    dir=${dir%/*}
    [ -d "$dir" ] || die $DIFFERS "$dir is missing: restore it from $tag"
    [ ! -L "$file" ] && [ "$(cd -P -- "$dir" && pwd)" = "$dir" ] ||
      die $SYMLINK "$file is reached through a symbolic link: put a copy in the link's place"
    if [ ! -w "$dir" ] || { [ -e "$file" ] && [ ! -w "$file" ]; }; then
      die $READ_ONLY "$file can't be replaced: make it and its folder writable"
    fi
    changed+=("$i")
  done
}

count_changed() {
  case ${#changed[@]} in 1) echo '1 file' ;; *) echo "${#changed[@]} files" ;; esac
}

# --- doing it -------------------------------------------------------------------------

hold_signals() { trap '' HUP INT QUIT TERM; }

release_signals() {
  trap 'die 129 "interrupted: nothing has changed"' HUP
  trap 'die 130 "interrupted: nothing has changed"' INT
  trap 'die 131 "interrupted: nothing has changed"' QUIT
  trap 'die 143 "interrupted: nothing has changed"' TERM
}

# The staging folder is in the tree, so that a rename stays within one filesystem, and is
# the lock: mkdir succeeds for one run only. A killed run's folder is taken over by renaming
# the file that names its owner, which again succeeds for one run only.
lock() {
  local dir=$tree/.apply_patches host=${HOSTNAME:-here} owner file
  local me=run-$host-$$
  [ -w "$tree" ] || die $READ_ONLY "$tree is read-only: make it writable"
  hold_signals
  if mkdir "$dir" 2>/dev/null; then
    stage=$dir
    staged overwrite /dev/null "$dir/$me"
  else
    [ -d "$dir" ] || die $FAILED "$dir can't be made: is the disk full?"
    for file in "$dir"/run-*; do owner=${file##*/}; done
    case ${owner:=unknown} in
      "run-$host-"[0-9]*) is_alive "${owner##*-}" || mv "$dir/$owner" "$dir/$me" 2>/dev/null || : ;;
    esac
    [ -e "$dir/$me" ] || die $BUSY "another run ($owner) is at work; if there is none, remove $dir"
    stage=$dir
    for file in "$dir"/*; do [ "$file" = "$dir/$me" ] || rm -rf -- "$file"; done
  fi
  release_signals
}

is_alive() { kill -0 "$1" 2>/dev/null || [ -d "/proc/$1" ]; }

unlock() { [ -z "$stage" ] || rm -rf -- "$stage"; }

overwrite() { cat "$1" >"$2"; } # FROM TO: TO keeps its mode and owner

staged() { # COMMAND...: which writes in $stage; where it fails, one line says why
  local words
  words=$("$@" 2>&1) || stage_failed "$words"
}

stage_failed() { # WORDS: of what failed
  refuse_full "$1"
  die $FAILED "$stage could not be written (${1##*: }): nothing has changed"
}

refuse_full() { # WORDS: returns where they are not about a full disk
  case $1 in
    *'No space left'* | *'quota exceeded'*)
      die $FAILED "the disk that holds $stage is full: nothing has changed; free some space" ;;
  esac
}

save_section() { section "$@" >"$stage/section"; } # DIFF FILE

section() { # DIFF FILE: prints the part of DIFF that is about FILE
  local line inside=''
  while IFS= read -r line; do
    case $line in
      "diff --git a/python/sglang/$2 b/python/sglang/$2") inside=1 ;;
      'diff --git '*) inside='' ;;
    esac
    [ -z "$inside" ] || printf '%s\n' "$line" || return
  done <"$1"
}

apply_section() { # DIFF FILE [-R]: to the copy of FILE in $stage/work
  staged save_section "$patches/$1" "$2"
  [ -s "$stage/section" ] || return 0
  ( # no command substitution: bash would have git ignore SIGQUIT in one
    cd -- "$stage/work"
    unset GIT_CONFIG_PARAMETERS GIT_CONFIG_COUNT
    if [ "$tool" = git ]; then # as outside any repository, whatever the user's settings
      GIT_DIR=/dev/null GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 \
        git apply --whitespace=nowarn ${3+"$3"} ../section
    else
      patch -p1 -F0 -f -s ${3+"$3"} <../section
    fi
  ) >"$stage/words" 2>&1 || {
    refuse_full "$(<"$stage/words")"
    staged overwrite "$stage/section" "$stage/words" # a full disk has no room for words either
    die $FAILED "$1 does not apply to $2: nothing has changed" \
      "(python -m pagealign.series check says more)"
  }
}

# Makes the new version of each changed file in $stage/new, and a copy of the present one in
# $stage/old. Each file goes by itself from the level which it is at to GOAL, so that a
# partly applied tree can be put right.
build_stage() { # GOAL
  local i n from file work
  staged mkdir -p "$stage/old" "$stage/new"
  for i in "${changed[@]}"; do
    file=${files[i]} work=$stage/work/python/sglang/${files[i]} from=$(file_level "$i")
    staged mkdir -p "${work%/*}"
    if [ -e "$tree/$file" ]; then
      staged cp -p "$tree/$file" "$stage/old/$i"
      staged overwrite "$tree/$file" "$work"
    fi
    for ((n = upto[from]; n < upto[$1]; n++)); do apply_section "${diffs[n]}" "$file"; done
    for ((n = upto[from] - 1; n >= upto[$1]; n--)); do apply_section "${diffs[n]}" "$file" -R; done
    [ "$(sha256 "$work")" = "${want[3 * i + $1]}" ] ||
      die $FAILED "$file would not become what $patches/PIN says: nothing has changed"
    [ -e "$work" ] || continue
    [ ! -e "$stage/old/$i" ] || staged cp -p "$stage/old/$i" "$stage/new/$i" # for its mode and owner
    staged overwrite "$work" "$stage/new/$i"
  done
}

put() { # FROM FILE: FILE becomes FROM, or goes if there is no FROM
  if [ -e "$1" ]; then mv -f -- "$1" "$2"; else rm -f -- "$2"; fi
}

swap() {
  local i j undo=()
  hold_signals
  for i in "${changed[@]}"; do
    if put "$stage/new/$i" "$tree/${files[i]}" 2>/dev/null; then
      undo+=("$i")
    else
      for j in "${undo[@]}"; do put "$stage/old/$j" "$tree/${files[j]}"; done
      die $FAILED "$tree/${files[i]} could not be replaced: all is as it was"
    fi
  done
}

find_tools() {
  if command -v sha256sum >/dev/null; then
    hasher=(sha256sum)
  elif command -v shasum >/dev/null; then
    hasher=(shasum -a 256)
  else
    die $NO_TOOL "neither sha256sum nor shasum: install coreutils"
  fi
  for tool in git patch none; do
    ! command -v $tool >/dev/null || break
  done
  [ $tool != none ] || [ "$mode" = status ] || die $NO_TOOL "neither git nor patch: install one"
}

take_path() {
  [ -z "$path" ] || die $USAGE "one PATH only: see --help"
  path=$1
}

parse() {
  while [ $# -gt 0 ]; do
    case $1 in
      --help | -h) usage && exit 0 ;;
      --check | --reverse | --status)
        [ "$mode" = apply ] || die $USAGE "only one of --check, --reverse, --status"
        mode=${1#--} ;;
      --core) goal=1 ;;
      --series)
        [ -n "${2-}" ] || die $USAGE "--series needs a name"
        series=$2 reverse="--series $2 --reverse" && shift ;;
      --installed) installed=1 ;;
      --patches)
        [ $# -gt 1 ] || die $USAGE "--patches needs a folder"
        patches=$2 && shift ;;
      --) while [ $# -gt 1 ]; do shift && take_path "$1"; done ;;
      -*) die $USAGE "unknown option $1: see --help" ;;
      *) take_path "$1" ;;
    esac
    shift
  done
  [ "${path:+1}" != "${installed:+1}" ] ||
    die $USAGE "say where SGLang is, by a PATH or --installed: see --help"
  case $mode/$goal in
    reverse/1 | status/1) die $USAGE "--core does not go with --$mode" ;;
    reverse/2) goal=0 ;;
  esac
  [ "$goal${series:+/series}" != 1/series ] || die $USAGE "--core does not go with --series"
}

mode=apply goal=2 path='' installed='' series='' reverse=--reverse
tool='' tree='' there='' stage=''
hasher=() have=() changed=()
patches=$(cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)/patches
parse "$@"
root=$patches
[ -z "$series" ] || select_series "$series"
find_tools
read_series
if [ -n "$path" ]; then find_tree "$path"; else find_installed; fi
there=$(release_there)
if [ "$mode" = status ]; then status && exit 0; fi

trap unlock EXIT
release_signals
if [ "$mode" = check ]; then
  judge $goal
  select_changes $goal
  stage=$(mktemp -d 2>/dev/null) ||
    die $FAILED "no temporary folder can be made in ${TMPDIR:-/tmp}: set TMPDIR to one that exists"
  build_stage $goal
  echo "would apply: $(count_changed) of $tree"
  exit 0
fi
[ -e "$tree/.apply_patches" ] || judge $goal # says "already applied" of a read-only tree too
lock
judge $goal # again: another run may have come in between
select_changes $goal
build_stage $goal
swap
case $goal in
  0) echo "reversed: $(count_changed) of $tree, stock again" ;;
  *) echo "${level_names[goal]}: $(count_changed) of $tree changed; $reverse takes that back" ;;
esac

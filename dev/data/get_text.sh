#!/usr/bin/env bash
# get_text.sh -- text to train on, as byte-level token files.
#
#   dev/data/get_text.sh                 two public-domain novels (Moby Dick, The Adventures of Sherlock Holmes; 1.8 MB)
#                                        from two Debian/Ubuntu packages -> data/novels_train.bin data/novels_val.bin
#   dev/data/get_text.sh FILE...         your own text files            -> data/NAME_train.bin data/NAME_val.bin
#
# Does nothing that is already done, so it can be run again. The packages are unpacked, not installed, and need no root.
# For GPT-2 tokens, other splits and many shards: dev/data/prepare_text.py.
set -euo pipefail

fail() { echo "error: $*" >&2; exit 1; }
case "${1:-}" in
  -h | --help) awk 'NR > 1 && !/^#/ {exit} NR > 1 {sub(/^# ?/, ""); print}' "${BASH_SOURCE[0]}"; exit 0 ;;
  -*) fail "unknown option $1; see --help" ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
command -v python3 >/dev/null || fail "python3 is missing; install it (apt-get install python3)"

prepare() {  # PREFIX FILE...: token files, unless they are newer than the text
  local prefix=$1 file; shift
  local fresh=1
  for file in "$@"; do
    [[ $prefix"_train.bin" -nt $file && $prefix"_val.bin" -nt $file ]] || fresh=0
  done
  if [[ $fresh = 1 ]]; then echo "${prefix}_train.bin and ${prefix}_val.bin are there"; return; fi
  python3 dev/data/prepare_text.py --out "$prefix" "$@"
}

if [[ $# -gt 0 ]]; then
  files=()
  for file in "$@"; do
    [[ $file = /* ]] || file=$OLDPWD/$file
    [[ -f $file ]] || fail "no file $file"
    files+=("$file")
  done
  name=$(basename "$1"); name=${name%.*}
  prepare "data/$name" "${files[@]}"
  exit 0
fi

own_text="give your own text: dev/data/get_text.sh FILE"
# A book stands between two marker lines of Project Gutenberg; around them, and in two lines at its ends, it is about
# the edition. Written with LF line ends and single blank lines.
extract_book() {  # SOURCE TARGET
  [[ -r $1 ]] || fail "the package does not hold $1 any more; $own_text"
  tr -d '\r' <"$1" | awk '/^\*\*\* START OF/ {inside = 1; next}
                       /^\*\*\* END OF|^End of (the )?Project Gutenberg/ {inside = 0}
                       inside && !/^Produced by /' | cat -s >"$2.tmp"
  [[ $(wc -c <"$2.tmp") -gt 100000 ]] || fail "$1 is not the book that was expected; $own_text"
  mv "$2.tmp" "$2"
}

books=(data/novels/moby_dick.txt data/novels/sherlock_holmes.txt)
if [[ ! -s ${books[0]} || ! -s ${books[1]} ]]; then
  command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null ||
    fail "the novels come from Debian or Ubuntu packages, and apt-get is not here; $own_text"
  packages=(golang-github-colinmarc-hdfs-dev golang-github-jdkato-prose-dev)
  work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
  download() { (cd "$work" && apt-get -qq download "${packages[@]}") >"$work/log" 2>&1; }
  # a fresh machine or container has no package lists yet; fetching them needs root
  if ! download; then
    { apt-get -qq update >"$work/log" 2>&1 && download; } || {
      tail -n 3 "$work/log" >&2
      fail "cannot download the novels: no network, or old package lists and not root (run apt-get update);" \
           "without a network $own_text"
    }
  fi
  for package in "$work"/*.deb; do dpkg-deb -x "$package" "$work/x"; done
  mkdir -p data/novels
  source=$work/x/usr/share/gocode/src/github.com
  extract_book "$source/colinmarc/hdfs/testdata/mobydick.txt" "${books[0]}"
  extract_book "$source/jdkato/prose/testdata/sherlock.txt" "${books[1]}"
  wc -c "${books[@]}"
fi
prepare data/novels "${books[@]}"

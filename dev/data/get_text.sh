#!/usr/bin/env bash
# get_text.sh -- text to train on, as byte-level token files.
#
#   dev/data/get_text.sh                 two public-domain novels (Moby Dick, The Adventures of Sherlock Holmes; 1.8 MB)
#                                        from two Debian/Ubuntu packages
#   dev/data/get_text.sh FILE...         your own text files
#
# Writes data/text/text_train.bin and data/text/text_val.bin (the last tenth of each text), where train_gpt2 looks when
# no --train-data is given; another choice of text replaces them.
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

out=data/text
prepare() {  # FILE...: token files, unless they were made from the same files and are newer
  local file done=1
  [[ -f $out/sources && $(<"$out/sources") = "$*" ]] || done=0
  for file in "$@"; do [[ $out/text_val.bin -nt $file ]] || done=0; done
  if [[ $done = 1 ]]; then
    echo "$out/text_train.bin and $out/text_val.bin are there"
    return
  fi
  mkdir -p "$out"
  rm -f "$out/sources"
  python3 dev/data/prepare_text.py --out "$out/text" "$@"
  echo "$*" >"$out/sources"
}

if [[ $# -gt 0 ]]; then
  files=()
  for file in "$@"; do
    [[ $file = /* ]] || file=$OLDPWD/$file
    [[ -f $file ]] || fail "no file $file"
    files+=("$file")
  done
  prepare "${files[@]}"
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

books=("$out/moby_dick.txt" "$out/sherlock_holmes.txt")
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
  mkdir -p "$out"
  source=$work/x/usr/share/gocode/src/github.com
  extract_book "$source/colinmarc/hdfs/testdata/mobydick.txt" "${books[0]}"
  extract_book "$source/jdkato/prose/testdata/sherlock.txt" "${books[1]}"
  wc -c "${books[@]}"
fi
prepare "${books[@]}"

"""The programs that run in containers, for any POSIX sh, dash's and busybox's too, with `head`.

Each starts as `sh -c LISTEN` and is told the rest through its standard input: so the APIs need to carry
neither bytes that aren't UTF-8, nor environments, nor the end of the input, and no command line shows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gymllm.errors import ConfigError

# A word, a program, the word again; then the next. `read` takes no byte more than its line from a pipe.
LISTEN = """while IFS= read -r word; do
  [ "$word" != exit ] || exit 0
  program=
  while IFS= read -r line || exit 1; do
    [ "$line" != "$word" ] || break
    program="$program$line
"
  done
  eval "$program"
done
"""
RETIRE = b"exit\n"

# Whether anybody is left whose parent is gone: it may hold the streams, and what it writes belongs to a
# command that is over. Process 1 has children in its own session only.
_LOOK_FOR_ORPHANS = rb"""left=
for file in /proc/[0-9]*/stat; do
  line=
  while IFS= read -r part || [ -n "$part" ]; do line=$part; done 2>/dev/null <"$file"
  case $line in *") "*) ;; *) continue ;; esac
  set -- ${line##*") "}
  [ "$1" = Z ] || [ "$2" != 1 ] || [ "$4" = 1 ] || left=left
done
"""
_IN_A_SESSION = (
    b'exec setsid sh -c \'printf "%%s %%s\\n" "$1" $$ >&2; shift; exec "$@"\' sh %s %s\n'
)

# Says what there is, then ends processes when told to, by built-ins alone: it works also when no process
# can be started any more. `begun` follows the local sandbox's supervisor: what descends from the shell, or
# is in a process group of those, but for what it had started before and the groups of that.
KEEPER = r"""export LC_ALL=C
look() {
  rows=
  for file in /proc/[0-9]*/stat; do
    line=
    while IFS= read -r part || [ -n "$part" ]; do line=$part; done 2>/dev/null <"$file"
    case $line in *") "*) ;; *) continue ;; esac
    set -- ${line##*") "}
    [ "$1" = Z ] && continue
    file=${file#/proc/}
    rows="$rows ${file%/stat}:$2:$3:$4"
  done
}
below() {
  grown=1
  while [ -n "$grown" ]; do
    grown=
    for row in $rows; do
      pid=${row%%:*} row=${row#*:}
      case "$known$spared" in *" $pid "*) continue ;; esac
      case "$known" in *" ${row%%:*} "*) known="$known$pid " grown=1 ;; esac
    done
  done
}
groups_of() {
  groups=" "
  for row in $rows; do
    case "$1" in *" ${row%%:*} "*) row=${row#*:*:} groups="$groups${row%%:*} " ;; esac
  done
}
session() {
  look
  known=" $1 " spared=" $$ 1 "
  for row in $rows; do [ "${row##*:}" = "$1" ] && known="$known${row%%:*} "; done
  below
  found=
  for row in $rows; do case "$known" in *" ${row%%:*} "*) found="$found ${row%%:*}" ;; esac; done
}
begun() {
  look
  root=$1
  shift
  known=" $* " spared=" "
  [ $# = 0 ] || below
  kept="$known$root $$ 1 "
  known=" $root " spared=$kept
  below
  groups_of "$kept"
  spared_groups=$groups
  groups_of " ${known#" $root "}"
  for row in $rows; do
    pid=${row%%:*} row=${row#*:*:}
    case "$known$kept" in *" $pid "*) continue ;; esac
    case "$spared_groups" in *" ${row%%:*} "*) continue ;; esac
    case "$groups" in *" ${row%%:*} "*) known="$known$pid " ;; esac
  done
  found=${known#" $root "}
}
facts=
line=
read -r line </proc/$$/stat
set -- ${line##*") "}
[ "$4" = $$ ] && facts="leader"
for tool in bash setsid tar; do command -v $tool >/dev/null 2>&1 && facts="$facts $tool"; done
printf '%s %s\n' "$word" "$facts"
while read -r answer how shell keep; do
  case $how in
  session)
    for round in 1 2 3 4 5 6 7 8 9; do
      session $shell
      [ -n "$found" ] || break
      case "$found " in *" $shell "*) kill -9 $shell ;; esac  # first, or it tells of the others
      kill -9 $found
    done ;;
  interrupt) begun $shell $keep; kill -2 $shell; [ -z "$found" ] || kill -2 $found ;;
  kill) begun $shell $keep; [ -z "$found" ] || kill -9 $found; kill -2 $shell ;;
  rest)
    for round in 1 2 3 4 5 6 7 8 9; do
      begun $shell $keep
      [ -n "$found" ] || break
      kill -9 $found
    done ;;
  esac 2>/dev/null
  printf '%s\n' "$answer"
done
"""


def quoted(text: bytes) -> bytes:
    """As one word for any sh."""
    return b"'%s'" % text.replace(b"'", b"'\\''")


def told(word: bytes, program: bytes) -> bytes:
    """What `LISTEN` is sent: the program, which finds the word in `$word`."""
    return b"%s\n%s\n%s\n" % (word, program, word)


def exports(env: Mapping[str, str]) -> bytes:
    """Sets the variables.

    Raises:
        ConfigError: No sh takes such a name, or a value holds a NUL byte.
    """
    lines: list[bytes] = []
    for name, value in env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
            raise ConfigError(
                f"sandbox.env: {name!r} must be letters, digits and _ in a container, without NUL."
            )
        lines.append(b"export %s=%s\n" % (name.encode(), quoted(_bytes(value))))
    return b"".join(lines)


def command(
    body: bytes, input_bytes: int, *, cwd: bytes, exports: bytes, stay: bool = False
) -> bytes:
    """Runs some lines in a sh of their own, fed with so many bytes of the input that follows.

    It says its own pid first, on stderr, and the status last, on both, behind `$word`. What sh says of it
    goes nowhere; what is said in it, also that there is no such program, is its output. The input is taken
    whole, whoever reads it: what is left would be in the way of the next, or break the connection. To `stay`
    it says `left` behind the status if somebody may still write.
    """
    feed = b"head -c %d 2>/dev/null | {\n" % input_bytes if input_bytes else b""
    return (
        b"printf '%%s %%s\\n' \"$word\" $$ >&2\n"
        b"exec 3>&2 2>/dev/null\n"
        b"%s(\n"
        b"unset word program line part file left\n"
        b"cd -- %s || exit 127\n"
        b"%s%s"
        b")%s 2>&3 3>&-\n"
        b"status=$?\n"
        b"%s"
        b"%s"
        b'printf \'%%s %%s\\n\' "$word" "$status $left"\n'
        b'printf \'%%s %%s\\n\' "$word" "$status $left" >&3\n'
        b"%s"
        b"exec 2>&3 3>&-\n"
    ) % (
        feed,
        quoted(cwd),
        exports,
        body,
        b"" if input_bytes else b" </dev/null",
        b"cat >/dev/null; exit $status; }\nstatus=$?\n" if input_bytes else b"",
        _LOOK_FOR_ORPHANS if stay else b"left=\n",
        b"" if stay else b"exit\n",
    )


def program(words: list[bytes], pid_word: bytes) -> bytes:
    """The body that becomes a program; in a session of its own, which it names, if there is a word for it."""
    line = b" ".join(map(quoted, words))
    return _IN_A_SESSION % (pid_word, line) if pid_word else b"exec %s\n" % line


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
